"""Text and token shards as streams: order, held-out part, token cache, and files that cannot be read or written."""

import errno
import glob
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data import corpus
from ringspan.trainer.data.dataset import Dataset
from ringspan.trainer.data.token_file import TokenFile
from tests.trainer.data.helpers import BYTES, END, BytesWithBegin, data_options, stream, text_source


def test_one_long_document_is_cut_for_the_held_out_part() -> None:
    long = stream("a" * 999)
    assert len(long.subset(True, 0.05)) == 50 and len(long.subset(False, 0.05)) == 950
    with pytest.raises(ValueError, match=r"data.held_out=0.5 leaves nothing of 3 tokens"):
        stream("ab").subset(False, 0.5)


def test_equal_texts_count_once_and_order_does_not_depend_on_file_names(tmp_path: Path) -> None:
    for folder, names in (("x", "abcd"), ("y", "dcba")):
        for name, text in zip(names, ["one", "two", "three", ""], strict=True):
            (tmp_path / folder / "sub").mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / f"{name}.txt").write_text(text)
        (tmp_path / folder / "sub" / "copy.txt").write_text("two")
        (tmp_path / folder / ".hidden").write_text("hidden")
        (tmp_path / folder / "binary").write_bytes(b"\0\1")
    cache = str(tmp_path / "cache")
    streams = [corpus.open_source(Source("text", paths=[str(tmp_path / f)]), BYTES, 257, cache) for f in "xy"]
    texts = ["".join("|" if i == END else chr(i) for i in s.read(np.arange(len(s)))) for s in streams]
    assert texts[0] == texts[1] and sorted(texts[0].split("|")) == ["", "one", "three", "two"]
    assert streams[0].ends.tolist() == [i for i, c in enumerate(texts[0]) if c == "|"]


def test_jsonl_has_one_document_per_line(tmp_path: Path) -> None:
    rows = [{"body": "first"}, {"body": "second", "x": 1}, {"body": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    source = Source(kind="text", paths=[str(tmp_path / "*.jsonl")], text_key="body")
    tokens = corpus.open_source(source, BYTES, 257, str(tmp_path / "cache"))
    assert len(tokens) == len("first" + "second") + 2 and len(tokens.ends) == 2
    with pytest.raises(ValueError, match=r"a.jsonl:1 is no JSON object with text under 'text': set the source's text_key"):
        corpus.open_source(Source(kind="text", paths=source.paths), BYTES, 257, str(tmp_path / "cache"))


def test_text_is_tokenized_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = text_source(tmp_path, 3), str(tmp_path / "cache")
    calls = []
    original = corpus._tokenize
    monkeypatch.setattr(corpus, "_tokenize", lambda *args: (calls.append(1), original(*args)))
    threads = [threading.Thread(target=corpus.open_source, args=(source, BYTES, 257, cache)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    (tmp_path / "text" / "0.txt").write_text("something else entirely")
    corpus.open_source(source, BYTES, 257, cache)
    assert len(calls) == 2


def test_shards_are_read_with_their_dtype_header_and_ends(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 0, 7, 8, 9, 0, 70000 % 300], np.uint32)
    (tmp_path / "a.bin").write_bytes(b"H" * 16 + tokens[:3].tobytes())
    (tmp_path / "b.bin").write_bytes(b"H" * 16 + tokens[3:].tobytes())
    source = Source(kind="tokens", paths=[str(tmp_path / "*.bin")], dtype="uint32", header=16, end_token=0)
    opened = corpus.open_source(source, BYTES, 300, str(tmp_path / "cache"))
    assert all(isinstance(shard, TokenFile) for shard in opened.shards)  # not a memory map, see TokenFile
    assert opened.read(np.arange(8)).tolist() == tokens.tolist() and opened.ends.tolist() == [2, 6]
    with pytest.raises(ValueError, match=r"hold the id 100, but the vocabulary has 64"):
        corpus.open_source(source, BYTES, 64, str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"no number of uint32 tokens"):
        source.header = 15
        corpus.open_source(source, BYTES, 300, str(tmp_path / "cache"))


def test_standard_library_has_no_tests_and_no_installed_packages(tmp_path: Path) -> None:
    data = Dataset(data_options(tmp_path, sources={"stdlib": Source()}), BYTES, seed=0)
    assert len(data.sources[0].stream) > 2_000_000
    assert not any("site-packages" in str(path) or "/test/" in str(path) for path in corpus.stdlib_files())


def test_document_begins_with_the_begin_token(tmp_path: Path) -> None:
    opened = Dataset(data_options(tmp_path, held_out=0.0), BytesWithBegin(), seed=0).sources[0].stream
    tokens = opened.read(np.arange(len(opened)))
    begins = [0, *(opened.ends[:-1] + 1)]
    assert len(opened.ends) > 50 and (np.flatnonzero(tokens == 600) == begins).all()
    assert (np.flatnonzero(tokens == 601) == opened.ends[opened.ends < len(opened)]).all()


def test_cache_that_is_no_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data.cache=.*no folder that can be written to"):
        Dataset(Data(sources={"s": Source()}, cache=str(tmp_path / "file" / "below")), BYTES, seed=0)


def test_full_cache_and_unreadable_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def unreadable(files: list[Path]) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(files[0]))

    with monkeypatch.context() as change, pytest.raises(ValueError, match=r"data.cache=.*No space left.*give another one"):
        change.setattr(np, "save", full)
        Dataset(data_options(tmp_path), BYTES, seed=0)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setattr(corpus, "file_signatures", unreadable)
    with pytest.raises(ValueError, match=r"data.sources.text: .*Permission denied: '.*\.txt'"):
        Dataset(data_options(tmp_path), BYTES, seed=0)


def test_a_cycle_of_links_ends_and_linked_folders_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("in/a.txt", "in/deep/er/b.txt", "in/.hidden.txt", "elsewhere/c.txt"):
        (tmp_path / name).write_text(name)
    for number in range(3):
        (tmp_path / "in" / f"loop{number}").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "deep" / "link").symlink_to(tmp_path / "elsewhere")
    for pattern in ("in/**/*.txt", "in/**", "**/deep/../*.txt", "i*/**/**/*.txt"):
        found = corpus.text_files([f"{tmp_path}/{pattern}"])
        expected = {"a.txt"} if "deep" in pattern else {"a.txt", "b.txt", "c.txt"}
        assert {path.name for path in found} == expected, pattern


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt", "a/**/*.txt", "a/**", "**", "?/*/c*", "a/**/b/*", "[ab].txt"])
def test_a_glob_without_links_finds_what_pythons_glob_finds(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.md", "a/b.txt", "a/b/c.txt", "a/b/c/d.txt", "a/.hidden/e.txt", ".f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    for prefix in ("", f"{tmp_path}/"):
        expected = {Path(name) for name in glob.glob(prefix + pattern, recursive=True) if Path(name).is_file()}
        assert {Path(name) for name in corpus._glob(prefix + pattern) if Path(name).is_file()} == expected


def test_jsonl_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"text": "x"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ValueError, match=r"deep.jsonl:2 is no JSON object with text under 'text'"):
        corpus.open_source(Source("text", paths=[str(tmp_path / "deep.jsonl")]), BYTES, 257, str(tmp_path / "cache"))


def test_a_shard_that_changes_after_it_was_opened_is_named(tmp_path: Path) -> None:
    shard = tmp_path / "a.bin"
    np.arange(5000, dtype=np.uint16).tofile(shard)
    opened = corpus.open_source(Source("tokens", paths=[str(shard)]), BYTES, 5000, str(tmp_path / "cache"))
    part = opened.subset(False, 0.1)
    with shard.open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff")
    with pytest.raises(ValueError, match=rf"{shard} has the id 65535, but the vocabulary has 5000: the file has changed"):
        part.read(np.arange(4000))
    assert part.read(np.arange(100)).tolist() == list(range(100))
    os.truncate(shard, 5000)
    with pytest.raises(ValueError, match=rf"{shard} has 5000 bytes, not 10000: it was cut short"):
        part.read(np.arange(4000))
