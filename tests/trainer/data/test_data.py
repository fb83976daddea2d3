"""Samples by number: labels, borders, order, slices for ranks, held-out parts, mixtures, caches, and what is refused."""

import errno
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ringspan import Layout, Mask
from ringspan.trainer.config.mixture import BLOCK, shares
from ringspan.trainer.config.schema import Data, Source, TokenizerOptions
from ringspan.trainer.data import corpus, tokenizer
from ringspan.trainer.data.corpus import TokenStream
from ringspan.trainer.data.dataset import Corpus, Dataset, permute, prefetch, samples_of

BYTES = tokenizer.load(TokenizerOptions())
END = BYTES.end


def stream(*documents: str) -> TokenStream:
    """Letters are 0 … 25; every document ends with 256."""
    parts = [[ord(c) - ord("a") for c in text] + [END] for text in documents]
    ends = np.cumsum([len(part) for part in parts]) - 1
    return TokenStream([np.array([*itertools.chain(*parts)], np.uint16)], ends)


def options(folder: Path, length: int = 64, sources: dict[str, Source] | None = None, **rest) -> Data:
    return Data(length=length, sources=sources or {"text": text_source(folder)}, cache=str(folder / "cache"), **rest)


def text_source(folder: Path, num: int = 60) -> Source:
    (folder / "text").mkdir(exist_ok=True)
    for i in range(num):
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: " + "abcdefgh" * (i % 7 + 1))
    return Source(kind="text", paths=[str(folder / "text")])


def window(source: Corpus, start: int):
    at = np.arange(source.length)
    tokens, labels = source.stream.read(start + at), source.stream.read(start + at + 1)
    labels[source.stream.is_end(start + at)] = -100
    return tokens.tolist(), labels.tolist(), source.stream.lengths(start, source.length).tolist()


def test_labels_are_the_next_token_of_the_document_and_an_end_has_none() -> None:
    source = Corpus(stream("abc", "d", "efghij"), 4, seed=0)
    assert window(source, 0) == ([0, 1, 2, END], [1, 2, END, -100], [4])
    assert window(source, 2) == ([2, END, 3, END], [END, -100, END, -100], [2, 2])
    assert window(source, 6) == ([4, 5, 6, 7], [5, 6, 7, 8], [4])  # the last label stands behind the window
    assert window(source, 11) == ([9, END, 0, 1], [END, -100, 1, 2], [2, 2])  # round the stream's end to its start


def test_a_window_longer_than_the_stream_goes_round() -> None:
    source = Corpus(stream("ab", "c"), 13, seed=0)
    tokens, labels, lengths = window(source, 0)
    assert tokens == [0, 1, END, 2, END] * 2 + [0, 1, END]
    assert labels == [1, END, -100, END, -100] * 2 + [1, END, -100]
    assert lengths == [3, 2, 3, 2, 3]


def test_an_unfinished_document_ends_where_the_stream_does() -> None:
    shards = TokenStream([np.array([1, 2, 9, 3], np.uint16), np.array([4, 5], np.uint16)], np.array([2]))
    source = Corpus(shards, 5, seed=0)
    assert window(source, 2) == ([9, 3, 4, 5, 1], [-100, 4, 5, -100, 2], [1, 3, 1])


@pytest.mark.parametrize("length", [1, 3, 50, 64, 999])
def test_an_epoch_has_every_token_once_and_each_begins_elsewhere(length: int) -> None:
    documents = ["".join(chr(97 + (i * j) % 26) for j in range(i % 9 + 1)) for i in range(40)]
    source = Corpus(stream(*documents), length, seed=3)
    total, num = len(source.stream), source.num_windows
    starts = []
    for epoch in range(3):
        offsets = []
        real = source.stream.read
        source.stream.read = lambda at, offsets=offsets, real=real: (offsets.append(at), real(at))[1]  # type: ignore
        for number in range(epoch * num, (epoch + 1) * num):
            source.window(number, np.arange(length))
        source.stream.read = real  # type: ignore
        seen = np.concatenate(offsets[::2]) % total
        assert len(np.unique(seen)) == min(num * length, total) and num * length > total - length
        starts.append([int(at[0]) for at in offsets[::2]])
    assert starts[0] != starts[1] and sorted(starts[0]) != sorted(starts[1])


def test_positions_restart_and_attention_stops_at_a_document(tmp_path: Path) -> None:
    batch = Dataset(options(tmp_path), BYTES, seed=0).batch(range(8))
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == batch.documents.shape == (8, 64)
    for ids, row in zip(batch.documents.tolist(), batch.positions.tolist(), strict=True):
        assert row == [at - ids.index(document) for at, document in enumerate(ids)]
    seen = Mask(causal=True, documents=batch.documents).visible(torch.arange(64), torch.arange(64))
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    assert torch.equal(seen, same & torch.ones(64, 64, dtype=torch.bool).tril())
    inner = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert torch.equal(batch.labels[:, :-1][inner], batch.tokens[:, 1:][inner])
    assert (batch.labels[:, :-1][~inner] == -100).all() and (batch.tokens[:, :-1][~inner] == END).all()
    assert batch.lengths == [n for row in batch.documents for n in torch.bincount(row).tolist()]


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_get_their_slices_of_the_same_window(tmp_path: Path, kind: str, ranks: int) -> None:
    sources = {"text": text_source(tmp_path), "recall": Source(kind="recall"), "passkey": Source(kind="passkey")}
    data = Dataset(options(tmp_path, 605, sources), BYTES, seed=0)
    whole, layout = data.batch(range(9)), Layout(kind, length=605, ranks=ranks)
    assert len(set(whole.sources)) == 3
    parts = [data.batch(range(9), layout.positions(rank)) for rank in range(ranks)]
    for name, fill in (("tokens", 0), ("labels", -100), ("positions", 0)):
        for rank, part in enumerate(parts):
            assert torch.equal(getattr(part, name), layout.shard(getattr(whole, name), dim=1, rank=rank, fill=fill)), name
    assert all(torch.equal(part.documents, whole.documents) and torch.equal(part.seeds, whole.seeds) for part in parts)


def test_a_rank_reads_only_its_own_tokens(tmp_path: Path) -> None:
    data = Dataset(options(tmp_path, 64), BYTES, seed=0)
    asked = []
    source = data.sources[0]
    real = source.stream.read  # type: ignore[union-attr]
    source.stream.read = lambda at: (asked.append(at), real(at))[1]  # type: ignore
    mine = torch.tensor([0, 1, 2, 60, 61])
    data.batch([5], mine)
    assert len(np.unique(np.concatenate(asked))) == 7  # and the label behind each piece


def test_a_sample_is_the_same_whenever_it_is_asked_for(tmp_path: Path) -> None:
    sources = {"text": text_source(tmp_path), "recall": Source(kind="recall", keys=4), "passkey": Source(kind="passkey")}
    a, b, other = (Dataset(options(tmp_path, 512, sources), BYTES, seed) for seed in (3, 3, 4))
    for sample in (0, 11, 2, 123_456_789_012):
        x, y = a.batch([sample]), b.batch([sample])
        assert torch.equal(x.tokens, y.tokens) and torch.equal(x.labels, y.labels) and torch.equal(x.seeds, y.seeds)
    assert not torch.equal(a.batch(range(8)).tokens, other.batch(range(8)).tokens)
    assert len({int(seed) for seed in a.batch(range(50)).seeds}) == 50
    first, second = a.windows([(1, 0)]), a.windows([(1, 1)])
    assert not torch.equal(first.tokens, second.tokens)


@pytest.mark.parametrize("data_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(data_size: int, micro_batch: int) -> None:
    config = Data(batch=8, micro_batch=micro_batch)
    micros = 8 // data_size // micro_batch
    found = [samples_of(3, m, config, rank, data_size) for rank in range(data_size) for m in range(micros)]
    assert list(itertools.chain(*found)) == list(range(24, 32))
    with pytest.raises(ValueError, match=r"data.batch=8, data.micro_batch=3"):
        samples_of(0, 0, Data(batch=8, micro_batch=3), 0, data_size)


def test_each_block_mixes_the_sources_exactly_by_weight(tmp_path: Path) -> None:
    sources = {"a": text_source(tmp_path), "b": Source(kind="recall", weight=0.5), "c": Source(kind="recall", weight=0)}
    data = Dataset(options(tmp_path, 512, sources), BYTES, seed=0)
    assert data.shares == [667, 333, 0]
    for block in (0, 1, 10**9):
        places = [data.place(block * BLOCK + i) for i in range(BLOCK)]
        numbers = {source: sorted(n for s, n in places if s == source) for source in (0, 1)}
        assert numbers == {0: list(range(block * 667, (block + 1) * 667)), 1: list(range(block * 333, (block + 1) * 333))}
    assert [s for s, _ in map(data.place, range(BLOCK))] != [s for s, _ in map(data.place, range(BLOCK, 2 * BLOCK))]


def test_shares_sum_up_and_what_would_never_be_drawn_is_refused() -> None:
    for weights in ([1], [1, 1, 1], [0.7, 0.2, 0.05, 0.05], [3, 1e-1, 7]):
        assert sum(shares(dict(zip("abcd", weights, strict=False)))) == BLOCK
    with pytest.raises(ValueError, match=r"data.sources.b.weight=1: less than 1 in 1000"):
        shares({"a": 1e6, "b": 1})
    with pytest.raises(ValueError, match=r"one above 0"):
        shares({"a": 0.0})


@pytest.mark.parametrize("num", [1, 2, 3, 17, 64, 1000])
def test_a_permutation_without_its_table(num: int) -> None:
    orders = [[permute(i, num, seed, "x") for i in range(num)] for seed in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(num))
    if num > 16:
        assert orders[0] != orders[1] and orders[0] != list(range(num))


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    config = options(tmp_path)
    train, held_out = (Dataset(config, BYTES, seed=7, part=part).sources[0].stream for part in ("train", "held_out"))
    assert train.last == held_out.first and train.first == 0 and held_out.last == held_out.begins[-1]
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.08
    assert held_out.first - 1 in held_out.ends  # the cut is where a document ends
    texts = [BYTES.decode(s.read(np.arange(len(s))).tolist()) for s in (train, held_out)]
    assert all((f"document {i}: " in texts[0]) != (f"document {i}: " in texts[1]) for i in range(60))
    again = Dataset(config, BYTES, seed=8, part="held_out")
    assert torch.equal(again.windows([(0, 0)]).tokens, Dataset(config, BYTES, seed=7, part="held_out").windows([(0, 0)]).tokens)


def test_one_long_document_is_cut_for_the_held_out_part() -> None:
    long = stream("a" * 999)
    assert len(long.part(True, 0.05)) == 50 and len(long.part(False, 0.05)) == 950
    with pytest.raises(ValueError, match=r"data.held_out=0.5 leaves nothing of 3 tokens"):
        stream("ab").part(False, 0.5)


def test_texts_count_once_in_an_order_that_names_do_not_decide(tmp_path: Path) -> None:
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


def test_jsonl_has_a_document_a_line(tmp_path: Path) -> None:
    rows = [{"body": "first"}, {"body": "second", "x": 1}, {"body": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    source = Source(kind="text", paths=[str(tmp_path / "*.jsonl")], text_key="body")
    found = corpus.open_source(source, BYTES, 257, str(tmp_path / "cache"))
    assert len(found) == len("first" + "second") + 2 and len(found.ends) == 2
    with pytest.raises(ValueError, match=r"a.jsonl:1 is no JSON object with text under 'text': set the source's text_key"):
        corpus.open_source(Source(kind="text", paths=source.paths), BYTES, 257, str(tmp_path / "cache"))


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = text_source(tmp_path, 3), str(tmp_path / "cache")
    calls = []
    real = corpus._tokenize
    monkeypatch.setattr(corpus, "_tokenize", lambda *args: (calls.append(1), real(*args)))
    threads = [threading.Thread(target=corpus.open_source, args=(source, BYTES, 257, cache)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    (tmp_path / "text" / "0.txt").write_text("something else entirely")
    corpus.open_source(source, BYTES, 257, cache)
    assert len(calls) == 2


def test_shards_are_mapped_with_their_dtype_header_and_ends(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 0, 7, 8, 9, 0, 70000 % 300], np.uint32)
    (tmp_path / "a.bin").write_bytes(b"H" * 16 + tokens[:3].tobytes())
    (tmp_path / "b.bin").write_bytes(b"H" * 16 + tokens[3:].tobytes())
    source = Source(kind="tokens", paths=[str(tmp_path / "*.bin")], dtype="uint32", header=16, end_token=0)
    found = corpus.open_source(source, BYTES, 300, str(tmp_path / "cache"))
    assert all(isinstance(shard, np.memmap) for shard in found.shards)
    assert found.read(np.arange(8)).tolist() == tokens.tolist() and found.ends.tolist() == [2, 6]
    with pytest.raises(ValueError, match=r"hold the id 100, but the vocabulary has 64"):
        corpus.open_source(source, BYTES, 64, str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"no number of uint32 tokens"):
        source.header = 15
        corpus.open_source(source, BYTES, 300, str(tmp_path / "cache"))


def test_the_standard_library_is_there(tmp_path: Path) -> None:
    data = Dataset(options(tmp_path, sources={"stdlib": Source()}), BYTES, seed=0)
    assert len(data.sources[0].stream) > 2_000_000
    assert not any("site-packages" in str(path) or "/test/" in str(path) for path in corpus.stdlib_files())


def test_recall_asks_for_facts_that_were_told_and_nothing_else_tells() -> None:
    data = Dataset(Data(length=400, sources={"r": Source(kind="recall", keys=5, values=7)}), BYTES, seed=0)
    task = data.sources[0]
    for number in range(20):
        batch, answers = data.windows([(0, number)]), task.answers(number)
        tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
        assert sorted(np.flatnonzero(labels >= 0)) == sorted(answers.at[:, 0]) and len(answers.at) > 50
        assert (tokens[answers.fact] == labels[answers.at[:, 0]]).all() and (answers.distance > 0).all()
        facts = np.flatnonzero(tokens >= 256 - 35)
        assert facts.max() < 100 and len(np.unique(tokens[facts])) == 5  # a key has one value, told in the first quarter
        for at, fact in zip(answers.at[:, 0], answers.fact, strict=True):
            assert not (tokens[fact + 1 : at] == labels[at]).any()  # the nearest telling
    assert task.answers(0).distance.max() > 300


def test_passkey_hides_a_number_at_any_depth_of_several_lengths() -> None:
    data = Dataset(Data(length=1024, sources={"p": Source(kind="passkey", digits=4)}), BYTES, seed=0)
    depths = []
    for number in range(20):
        batch, answers = data.windows([(0, number)]), data.sources[0].answers(number)
        assert sorted(answers.length) == [256, 256, 512] and batch.lengths == answers.length.tolist()
        for at, fact, length in zip(answers.at, answers.fact, answers.length, strict=True):
            key = BYTES.decode(batch.labels[0, at].tolist())
            begin = int(at[-1]) + 3 - length
            text = BYTES.decode(batch.tokens[0, begin : at[-1] + 2].tolist())
            assert text.count(f"The pass key is{key}") == 2 and text.endswith(f"What is the pass key? The pass key is{key}")
            assert BYTES.decode(batch.tokens[0, : fact + 1].tolist()).endswith(f"{key} is the pass key. ")
        assert int((batch.labels >= 0).sum()) == 3 * 5
        depths += answers.depth.tolist()
    assert min(depths) < 0.1 and max(depths) > 0.9


class BytesWithBegin(tokenizer.Bytes):
    """Bytes, with a token that begins a document as in Llama 3: its id is just below the end's."""

    size, begin, end, fingerprint = 602, (600,), 601, "begun"


def test_a_document_begins_with_its_token(tmp_path: Path) -> None:
    found = Dataset(options(tmp_path, held_out=0.0), BytesWithBegin(), seed=0).sources[0].stream
    tokens = found.read(np.arange(len(found)))
    begins = [0, *(found.ends[:-1] + 1)]
    assert len(found.ends) > 50 and (np.flatnonzero(tokens == 600) == begins).all()
    assert (np.flatnonzero(tokens == 601) == found.ends[found.ends < len(found)]).all()


def test_synthetic_texts_begin_with_it_too_and_recall_leaves_it_alone() -> None:
    sources = {"passkey": Source(kind="passkey"), "recall": Source(kind="recall")}
    data = Dataset(Data(length=1024, sources=sources), BytesWithBegin(), seed=0)
    for number in range(20):
        batch, answers = data.windows([(0, number)]), data.sources[0].answers(number)
        tokens = batch.tokens[0].numpy()
        ends = np.cumsum(batch.lengths) - 1
        assert np.flatnonzero(tokens == 600).tolist() == [0, *(ends[:-1] + 1)]
        assert np.flatnonzero(tokens == 601).tolist() == ends.tolist()
        for at, fact in zip(answers.at, answers.fact, strict=True):
            key = BYTES.decode(batch.labels[0, at].tolist())
            assert BYTES.decode(tokens[: fact + 1].tolist()).endswith(f"{key} is the pass key. ")
    assert int(data.windows([(1, number) for number in range(64)]).tokens.max()) == 599


def test_prefetch_keeps_order_raises_errors_and_ends() -> None:
    made = []

    def make(number: int):
        if number == 7:
            raise RuntimeError("seven")
        made.append(number)
        return number

    ahead = prefetch(make, 3, depth=2)  # type: ignore[arg-type]
    assert next(ahead) == 3
    time.sleep(0.3)
    assert made == [3, 4, 5, 6]  # one taken, two waiting, one in hand
    assert [next(ahead), next(ahead), next(ahead)] == [4, 5, 6]
    with pytest.raises(RuntimeError, match=r"seven"):
        next(ahead)
    plain = prefetch(make, 0, depth=0)  # type: ignore[arg-type]
    assert [next(plain) for _ in range(3)] == [0, 1, 2]
    left = prefetch(lambda n: n, 0, depth=1)  # type: ignore[arg-type]
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_prefetch_survives_sigterm() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        ahead = prefetch(lambda n: n, 0, depth=1)  # type: ignore[arg-type]
        assert next(ahead) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert [next(ahead) for _ in range(5)] == [1, 2, 3, 4, 5] and heard
        ahead.close()  # type: ignore[attr-defined]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("source", "length", "message"),
    [
        (Source(kind="text", paths=["nowhere/*.md"]), 64, r"data.sources.x: paths: 'nowhere/\*.md' names no file"),
        (Source(kind="text"), 64, "data.sources.x: paths is empty"),
        (Source(kind="tokens"), 64, "data.sources.x: paths is empty"),
        (Source(kind="recall", keys=40, values=8), 512, "keys=40, values=8: they need 392 ids, and the tokenizer has 257"),
        (Source(kind="recall"), 16, "keys=8, facts=0.06, questions=0.25"),
        (Source(kind="passkey"), 100, "make data.length at least"),
    ],
)
def test_what_a_source_cannot_do_is_named(tmp_path: Path, source: Source, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset(options(tmp_path, length, {"x": source}), BYTES, seed=0)


def test_no_sources_and_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.sources is empty"):
        Dataset(Data(sources={}), BYTES, seed=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data.cache=.*no folder that can be written to"):
        Dataset(Data(sources={"s": Source()}, cache=str(tmp_path / "file" / "below")), BYTES, seed=0)


def test_a_full_cache_and_a_file_that_is_closed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def closed(files: list[Path]) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(files[0]))

    with monkeypatch.context() as change, pytest.raises(ValueError, match=r"data.cache=.*No space left.*give another one"):
        change.setattr(np, "save", full)
        Dataset(options(tmp_path), BYTES, seed=0)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setattr(corpus, "_as_they_are", closed)
    with pytest.raises(ValueError, match=r"data.sources.text: .*Permission denied: '.*\.txt'"):
        Dataset(options(tmp_path), BYTES, seed=0)


def test_without_locks_every_process_makes_its_own_and_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def make(folder: Path) -> None:
        (folder / "made").write_text("whole")

    monkeypatch.setattr(corpus.fcntl, "flock", no_locks)
    name = corpus._cached(str(tmp_path), ["a"], make).name
    assert "has no locks (No locks available), so every process tokenizes for itself" in capsys.readouterr().out
    (tmp_path / name).rename(tmp_path / f"{name}.7")  # another process at work

    def too_late(folder: Path) -> None:
        make(folder)
        (tmp_path / f"{name}.7").rename(tmp_path / name)
        (tmp_path / name / "made").write_text("sooner")

    for _ in range(2):
        assert (corpus._cached(str(tmp_path), ["a"], too_late) / "made").read_text() == "sooner"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}.lock"]


def test_what_a_killed_tokenization_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container the next process may have the same number."""
    key = ["a", 1]

    def make(folder: Path) -> None:
        (folder / "made").write_text("whole")

    name = corpus._cached(str(tmp_path), key, make).name
    (tmp_path / name / "made").unlink()
    (tmp_path / name).rmdir()
    for number in (os.getpid(), 7):
        (tmp_path / f"{name}.{number}").mkdir()
        (tmp_path / f"{name}.{number}" / "part").write_text("cut")
    assert (corpus._cached(str(tmp_path), key, make) / "made").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}.lock"]
