"""The token cache: whole or absent, verified at each start, made again when a file has changed; one maker per machine."""

import errno
import os
import random
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from ringspan.trainer import files
from ringspan.trainer.config.schema import Source
from ringspan.trainer.data import cache, corpus
from ringspan.trainer.data.corpus import TokenStream
from tests.trainer.data.helpers import BYTES, text_source


def make_whole(new: cache.Builder) -> None:
    with new.open("made") as file:
        file.write(b"whole")


def content(folder: cache.CachedFolder) -> str:
    return (folder.path / "made").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_locks_every_process_tokenizes_and_the_first_result_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    name = cache.open_cached(str(tmp_path), ["a"], make_whole).path.name
    assert "has no locks (No locks available), so every process tokenizes for itself" in capsys.readouterr().out
    (tmp_path / name).rename(tmp_path / f"{name}.7")  # the unfinished folder of another process

    def make_late(new: cache.Builder) -> None:
        with new.open("made") as file:
            file.write(b"later")
        (tmp_path / f"{name}.7").rename(tmp_path / name)

    for _ in range(2):
        assert content(cache.open_cached(str(tmp_path), ["a"], make_late)) == "whole"
    assert names(tmp_path) == [name, f"{name}.lock"]


def test_leftovers_of_a_killed_tokenization_are_removed(tmp_path: Path) -> None:
    """Also those with this process's own id, which a container can assign again."""
    key = ["a", 1]
    name = cache.open_cached(str(tmp_path), key, make_whole).path.name
    files.remove(tmp_path / name)
    for suffix in (f"{os.getpid()}-node", "7", "old"):
        (tmp_path / f"{name}.{suffix}").mkdir()
        (tmp_path / f"{name}.{suffix}" / "part").write_text("cut")
    assert content(cache.open_cached(str(tmp_path), key, make_whole)) == "whole"
    assert names(tmp_path) == [name, f"{name}.lock"]


def open_text(tmp_path: Path) -> TokenStream:
    source = Source(kind="text", paths=[str(tmp_path / "text")])
    if not (tmp_path / "text").exists():
        source = text_source(tmp_path)
    return corpus.open_source(source, BYTES, 257, str(tmp_path / "cache"))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def ones(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 10)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [zeros, ones, cut, Path.unlink, replace_by_fifo], ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", ["tokens.bin", "ends.npy", "pages.bin", "manifest.json"])
def test_a_damaged_cache_is_named_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    before = open_text(tmp_path)
    assert before.cached is not None
    tokens, ends = before.read(np.arange(len(before))), before.ends.tolist()
    assert capsys.readouterr().out == ""
    damage(before.cached.path / name)
    after = open_text(tmp_path)
    assert (after.read(np.arange(len(after))) == tokens).all() and after.ends.tolist() == ends
    printed = capsys.readouterr().out
    assert printed.startswith("data.cache: ") and printed.count("the folder is made again") == 1 and name[:5] in printed
    open_text(tmp_path)
    assert capsys.readouterr().out == "" and len(names(tmp_path / "cache")) == 2


@pytest.mark.parametrize("number", range(40))
def test_a_mutated_manifest_never_ends_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    """Flips, cuts, swaps and insertions in manifest.json."""
    draw = random.Random(number)
    folder = cache.open_cached(str(tmp_path), ["a"], make_whole).path
    data = bytearray((folder / "manifest.json").read_bytes())
    at, other = draw.randrange(len(data)), draw.randrange(len(data))
    kind = number % 4
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at], data[other] = data[other], data[at]
    else:
        data[at:at] = draw.choice([b"[" * 100_000, b"NaN", b'"', b"9" * 50, b"\xff"])
    (folder / "manifest.json").write_bytes(data)
    assert content(cache.open_cached(str(tmp_path), ["a"], make_whole)) == "whole"


def test_a_shard_that_changed_with_its_size_and_time_kept_is_indexed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = tmp_path / "a.bin"
    np.arange(1000, dtype=np.uint16).tofile(shard)
    source = Source(kind="tokens", paths=[str(shard)], end_token=7)
    before, times = corpus.open_source(source, BYTES, 1000, str(tmp_path / "cache")), os.stat(shard)
    np.arange(1000, dtype=np.uint16)[::-1].tofile(shard)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = corpus.open_source(source, BYTES, 1000, str(tmp_path / "cache"))
    assert f"{shard} has changed since its checksum was made" in capsys.readouterr().out
    assert before.ends.tolist() == [7] and after.ends.tolist() == [992]
    assert before.cached and after.cached and before.cached.sha256 != after.cached.sha256


def test_a_start_compares_a_sample_of_pages_and_all_of_them_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "PAGE", 64)
    monkeypatch.setattr(cache, "SAMPLE", 4)
    monkeypatch.setattr(cache.time, "time", lambda: 0.0)
    folder = cache.open_cached(str(tmp_path), ["a"], lambda new: make_random(new, 200 * 64))
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(cache.os, "pread", lambda *args: (reads.append(args[2] // 64), pread(*args))[1])
    folder.verify(full=False)
    assert {0, 199} < set(reads) and len(reads) <= 6, "the ends and a sample"
    (page,) = [number for number in range(200) if number not in reads][:1]
    with (folder.path / "made").open("r+b") as file:
        file.seek(64 * page + 5)
        byte = file.read(1)
        file.seek(64 * page + 5)
        file.write(bytes([byte[0] ^ 16]))
    folder.verify(full=False)
    with pytest.raises(cache.Damaged, match=rf"made has changed since its checksum was made, near byte {64 * page}$"):
        folder.verify(full=True)
    assert cache.open_cached(str(tmp_path), ["a"], lambda new: make_random(new, 200 * 64), full=True).sha256 == folder.sha256
    assert "the folder is made again" in capsys.readouterr().out


def test_a_folder_that_another_rank_discards_while_this_one_reads_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, open_regular = cache.open_cached(str(tmp_path), ["a"], make_whole).path, files.open_regular

    def open_late(path: Path) -> FileIO:
        if path.name == "made":  # verify has just seen it
            monkeypatch.undo()
            files.discard(folder)
        return open_regular(path)

    monkeypatch.setattr(files, "open_regular", open_late)
    assert content(cache.open_cached(str(tmp_path), ["a"], make_whole)) == "whole" and open_regular is files.open_regular

    def refuse(path: Path) -> FileIO:
        if path.name == "made":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_regular(path)

    monkeypatch.setattr(files, "open_regular", refuse)
    with pytest.raises(ValueError, match=r"is no folder that can be written to: .*Permission denied"):
        cache.open_cached(str(tmp_path), ["a"], make_whole)


def make_random(new: cache.Builder, size: int) -> None:
    with new.open("made") as file:
        file.write(random.Random(0).randbytes(size))


def test_sums_do_not_depend_on_the_parts_that_are_added() -> None:
    data, draw = random.Random(1).randbytes(3 * cache.PAGE + 77), random.Random(2)
    whole, parts, begin = cache.PageSums(), cache.PageSums(), 0
    whole.add(data)
    while begin < len(data):
        size = draw.choice([1, 1000, cache.PAGE - 1, cache.PAGE])
        parts.add(data[begin : begin + size])
        begin += size
    assert (parts.size, parts.sha256.hexdigest(), parts.pages) == (whole.size, whole.sha256.hexdigest(), whole.pages)
    assert len(whole.pages) == 4


def test_every_file_is_on_disk_before_the_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[tuple[str, str]] = []
    monkeypatch.setattr(files, "observer", lambda when, kind, path: when == "after" and operations.append((kind, path.name)))
    folder = open_text(tmp_path).cached
    assert folder is not None
    renamed = next(i for i, (kind, _) in enumerate(operations) if kind == "rename")
    for name in ("tokens.bin", "ends.npy", "pages.bin", "manifest.json"):
        last_write = max(i for i, entry in enumerate(operations) if entry == ("write", name))
        assert last_write < operations.index(("sync", name)) < renamed
    assert operations[renamed - 1][0] == "sync" and operations[renamed + 1] == ("sync", "cache"), "the folders' names as well"


class Killed(BaseException):
    """Stands for the end of the process at an operation."""


def test_a_kill_at_any_operation_leaves_a_whole_folder_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each operation of making a folder, and of making a damaged one again."""
    cleanup = files.remove
    for damaged in (False, True):
        for number in range(1000):
            root, calls = tmp_path / f"{damaged}-{number}", []
            if damaged:
                zeros(cache.open_cached(str(root), ["a"], make_whole).path / "made")

            def observe(when: str, kind: str, path: Path, number: int = number, calls: list = calls) -> None:
                calls.append((when, kind))
                if len(calls) == number + 1:
                    monkeypatch.setattr(files, "remove", lambda path: None)  # a dead process cleans up nothing
                    raise Killed

            monkeypatch.setattr(files, "observer", observe)
            try:
                cache.open_cached(str(root), ["a"], make_whole)
            except Killed:
                pass
            else:
                break  # every operation has been a kill point
            finally:
                monkeypatch.setattr(files, "observer", None)
                monkeypatch.setattr(files, "remove", cleanup)
            for path in root.iterdir():
                if "." not in path.name and not damaged:  # the name of a whole folder
                    cache.CachedFolder(path).verify(full=True)
            folder = cache.open_cached(str(root), ["a"], make_whole)
            folder.verify(full=True)
            assert content(folder) == "whole" and len(names(root)) == 2, (number, calls[-1])
        assert number > 20
