"""Samples by number: labels, borders of documents, order, shards of ranks, mixtures, prefetching, and rejected sources."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from ringspan import Layout, Mask
from ringspan.trainer.config.mixture import BLOCK
from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data.corpus import TokenStream
from ringspan.trainer.data.dataset import Corpus, Dataset, permute, samples_of
from tests.trainer.data.helpers import BYTES, END, data_options, stream, text_source


def window(source: Corpus, start: int):
    """Tokens, labels and document lengths of the window at `start`."""
    positions = start + np.arange(source.length)
    tokens, labels = source.stream.read(positions), source.stream.read(positions + 1)
    labels[source.stream.is_end(positions)] = -100
    return tokens.tolist(), labels.tolist(), source.stream.lengths(start, source.length).tolist()


def test_labels_are_the_next_token_and_document_ends_have_none() -> None:
    source = Corpus(stream("abc", "d", "efghij"), 4, seed=0)
    assert window(source, 0) == ([0, 1, 2, END], [1, 2, END, -100], [4])
    assert window(source, 2) == ([2, END, 3, END], [END, -100, END, -100], [2, 2])
    assert window(source, 6) == ([4, 5, 6, 7], [5, 6, 7, 8], [4])  # the last label is the token after the window
    assert window(source, 11) == ([9, END, 0, 1], [END, -100, 1, 2], [2, 2])  # wraps around the end of the stream


def test_window_longer_than_the_stream_wraps_around() -> None:
    source = Corpus(stream("ab", "c"), 13, seed=0)
    tokens, labels, lengths = window(source, 0)
    assert tokens == [0, 1, END, 2, END] * 2 + [0, 1, END]
    assert labels == [1, END, -100, END, -100] * 2 + [1, END, -100]
    assert lengths == [3, 2, 3, 2, 3]


def test_unfinished_document_ends_at_the_end_of_the_stream() -> None:
    shards = TokenStream([np.array([1, 2, 9, 3], np.uint16), np.array([4, 5], np.uint16)], np.array([2]))
    source = Corpus(shards, 5, seed=0)
    assert window(source, 2) == ([9, 3, 4, 5, 1], [-100, 4, 5, -100, 2], [1, 3, 1])


@pytest.mark.parametrize("length", [1, 3, 50, 64, 999])
def test_epoch_reads_every_token_once_and_epochs_differ_in_offset(length: int) -> None:
    documents = ["".join(chr(97 + (i * j) % 26) for j in range(i % 9 + 1)) for i in range(40)]
    source = Corpus(stream(*documents), length, seed=3)
    total, num = len(source.stream), source.num_windows
    starts = []
    for epoch in range(3):
        reads = []
        original = source.stream.read
        source.stream.read = lambda at, reads=reads, original=original: (reads.append(at), original(at))[1]  # type: ignore
        for number in range(epoch * num, (epoch + 1) * num):
            source.window(number, np.arange(length))
        source.stream.read = original  # type: ignore
        tokens = np.concatenate(reads[::2]) % total
        assert len(np.unique(tokens)) == min(num * length, total) and num * length > total - length
        starts.append([int(positions[0]) for positions in reads[::2]])
    assert starts[0] != starts[1] and sorted(starts[0]) != sorted(starts[1])


def test_positions_restart_and_attention_stops_at_a_document(tmp_path: Path) -> None:
    batch = Dataset(data_options(tmp_path), BYTES, seed=0).batch(range(8))
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == batch.documents.shape == (8, 64)
    for ids, row in zip(batch.documents.tolist(), batch.positions.tolist(), strict=True):
        assert row == [position - ids.index(document) for position, document in enumerate(ids)]
    visible = Mask(causal=True, documents=batch.documents).visible(torch.arange(64), torch.arange(64))
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    assert torch.equal(visible, same & torch.ones(64, 64, dtype=torch.bool).tril())
    inner = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert torch.equal(batch.labels[:, :-1][inner], batch.tokens[:, 1:][inner])
    assert (batch.labels[:, :-1][~inner] == -100).all() and (batch.tokens[:, :-1][~inner] == END).all()
    assert batch.lengths == [n for row in batch.documents for n in torch.bincount(row).tolist()]


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_get_their_shards_of_the_same_window(tmp_path: Path, kind: str, ranks: int) -> None:
    sources = {"text": text_source(tmp_path), "recall": Source(kind="recall"), "passkey": Source(kind="passkey")}
    data = Dataset(data_options(tmp_path, 605, sources), BYTES, seed=0)
    full, layout = data.batch(range(9)), Layout(kind, length=605, ranks=ranks)
    assert len(set(full.sources)) == 3
    shards = [data.batch(range(9), layout.positions(rank)) for rank in range(ranks)]
    for name, fill in (("tokens", 0), ("labels", -100), ("positions", 0)):
        for rank, shard in enumerate(shards):
            assert torch.equal(getattr(shard, name), layout.shard(getattr(full, name), dim=1, rank=rank, fill=fill)), name
    assert all(torch.equal(shard.documents, full.documents) and torch.equal(shard.seeds, full.seeds) for shard in shards)


def test_rank_reads_only_its_own_tokens_and_the_probes(tmp_path: Path) -> None:
    data = Dataset(data_options(tmp_path, 1024), BYTES, seed=0)
    reads = []
    source = data.sources[0]
    original = source.stream.read  # type: ignore[union-attr]
    source.stream.read = lambda at: (reads.append(at), original(at))[1]  # type: ignore
    owned = np.array([0, 1, 2, 60, 61])
    data.batch([5], torch.tensor(owned))
    probes = data._probes(*data.locate(5))
    expected = {*owned, *(owned + 1), *probes, *(probes + 1)}  # with the label after each range
    offsets = np.unique(np.concatenate(reads)) - np.concatenate(reads)[0]
    assert set(offsets.tolist()) == expected and len(set(probes.tolist())) == 64


def test_sample_depends_only_on_its_number_and_the_seed(tmp_path: Path) -> None:
    sources = {"text": text_source(tmp_path), "recall": Source(kind="recall", keys=4), "passkey": Source(kind="passkey")}
    a, b, other = (Dataset(data_options(tmp_path, 512, sources), BYTES, seed) for seed in (3, 3, 4))
    for sample in (0, 11, 2, 123_456_789_012):
        x, y = a.batch([sample]), b.batch([sample])
        assert torch.equal(x.tokens, y.tokens) and torch.equal(x.labels, y.labels) and torch.equal(x.seeds, y.seeds)
    assert not torch.equal(a.batch(range(8)).tokens, other.batch(range(8)).tokens)
    assert len({int(seed) for seed in a.batch(range(50)).seeds}) == 50
    first, second = a.windows([(1, 0)]), a.windows([(1, 1)])
    assert not torch.equal(first.tokens, second.tokens)


@pytest.mark.parametrize("data_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_step_has_the_same_samples_for_any_number_of_ranks(data_size: int, micro_batch: int) -> None:
    config = Data(batch=8, micro_batch=micro_batch)
    num_micro = 8 // data_size // micro_batch
    samples = [samples_of(3, micro, config, rank, data_size) for rank in range(data_size) for micro in range(num_micro)]
    assert list(itertools.chain(*samples)) == list(range(24, 32))
    with pytest.raises(ValueError, match=r"data.batch=8, data.micro_batch=3"):
        samples_of(0, 0, Data(batch=8, micro_batch=3), 0, data_size)


def test_each_block_mixes_the_sources_exactly_by_weight(tmp_path: Path) -> None:
    sources = {"a": text_source(tmp_path), "b": Source(kind="recall", weight=0.5), "c": Source(kind="recall", weight=0)}
    data = Dataset(data_options(tmp_path, 512, sources), BYTES, seed=0)
    assert data.shares == [667, 333, 0]
    for block in (0, 1, 10**9):
        locations = [data.locate(block * BLOCK + i) for i in range(BLOCK)]
        numbers = {source: sorted(n for s, n in locations if s == source) for source in (0, 1)}
        assert numbers == {0: list(range(block * 667, (block + 1) * 667)), 1: list(range(block * 333, (block + 1) * 333))}
    assert [s for s, _ in map(data.locate, range(BLOCK))] != [s for s, _ in map(data.locate, range(BLOCK, 2 * BLOCK))]


@pytest.mark.parametrize("num", [1, 2, 3, 17, 64, 1000])
def test_permute_is_a_permutation(num: int) -> None:
    orders = [[permute(i, num, seed, "x") for i in range(num)] for seed in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(num))
    if num > 16:
        assert orders[0] != orders[1] and orders[0] != list(range(num))


def test_training_never_reads_held_out_text(tmp_path: Path) -> None:
    config = data_options(tmp_path)
    train, held_out = (Dataset(config, BYTES, seed=7, part=part).sources[0].stream for part in ("train", "held_out"))
    assert train.last == held_out.first and train.first == 0 and held_out.last == held_out.begins[-1]
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.08
    assert held_out.first - 1 in held_out.ends  # the cut is at the end of a document
    texts = [BYTES.decode(s.read(np.arange(len(s))).tolist()) for s in (train, held_out)]
    assert all((f"document {i}: " in texts[0]) != (f"document {i}: " in texts[1]) for i in range(60))
    windows = [Dataset(config, BYTES, seed=seed, part="held_out").windows([(0, 0)]) for seed in (8, 7)]
    assert torch.equal(windows[0].tokens, windows[1].tokens), "held-out windows do not depend on the seed"


@pytest.mark.parametrize(
    ("source", "length", "message"),
    [
        (Source(kind="text", paths=["nowhere/*.md"]), 64, r"data.sources.x: paths: 'nowhere/\*.md' matches no file"),
        (Source(kind="text"), 64, "data.sources.x: paths is empty"),
        (Source(kind="tokens"), 64, "data.sources.x: paths is empty"),
        (Source(kind="recall", keys=40, values=8), 512, "keys=40, values=8: they need 392 ids, and the tokenizer has 257"),
        (Source(kind="recall"), 16, "keys=8, facts=0.06, questions=0.25"),
        (Source(kind="passkey"), 100, "make data.length at least"),
    ],
)
def test_invalid_source_is_rejected_by_name(tmp_path: Path, source: Source, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset(data_options(tmp_path, length, {"x": source}), BYTES, seed=0)


def test_empty_mixture_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"data.sources is empty"):
        Dataset(Data(sources={}), BYTES, seed=0)
