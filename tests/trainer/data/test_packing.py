"""Best-fit packing: each token once, little padding, documents cut only if they are longer than a window, the same loss."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ringspan.trainer.config.schema import Model
from ringspan.trainer.data.dataset import Corpus, Dataset, PackedCorpus
from ringspan.trainer.data.packing import NO_TOKEN, best_fit
from ringspan.trainer.model import GPT
from tests.trainer.data.helpers import BYTES, data_options, stream

SIZES = np.random.default_rng(0).lognormal(4, 1.2, 3000).astype(int) + 1


@pytest.mark.parametrize("length", [64, 512, 4096])
def test_each_token_is_in_one_window_and_few_documents_are_cut(length: int) -> None:
    bins = best_fit(SIZES, length)
    positions = np.concatenate([bins.window(i)[0] for i in range(len(bins))])
    assert (np.sort(positions[positions != NO_TOKEN]) == np.arange(SIZES.sum())).all()
    assert all(bins.window(i)[1].sum() == length for i in range(len(bins)))
    pieces = len(bins.starts)
    assert pieces == (-(-SIZES // length)).sum()  # a document of at most `length` tokens is one piece
    assert bins.padding == pytest.approx((positions == NO_TOKEN).mean())
    assert bins.padding < (0.05 if length > 64 else 0.1)
    ends = np.cumsum(SIZES)
    long = length < SIZES
    assert bins.cut == long.mean() < bins.stream_cut
    borders = np.arange(length, SIZES.sum(), length)
    crossed = np.unique(np.searchsorted(ends, borders[~np.isin(borders, ends)], side="right"))  # documents that span a border
    assert bins.stream_cut == pytest.approx(len(crossed) / len(SIZES))


def test_the_fullest_window_with_space_takes_a_document() -> None:
    bins = best_fit([6, 9, 3, 1, 4, 25], 10)
    windows = [sorted(bins.sizes[bins.first[i] : bins.first[i + 1]].tolist()) for i in range(len(bins))]
    assert sorted(windows) == [[1, 9], [3, 5], [4, 6], [10], [10]]
    assert best_fit([10, 20], 10).padding == 0


def test_loss_equals_the_loss_document_by_document() -> None:
    """Every document alone, at positions from 0, against all windows; the next token of a cut document is a label in both."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), size)) for size in rng.integers(1, 90, 40)]
    length = 100
    source = PackedCorpus(stream(*texts), length, seed=0)
    model = GPT(Model(vocabulary=257, layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=64, init_std=0.2))
    packed, count = 0.0, 0
    with torch.no_grad():
        for number in range(source.num_windows):
            tokens, labels, lengths = source.window(number, np.arange(length))
            documents = np.repeat(np.arange(len(lengths)), lengths)
            positions = np.arange(length) - (np.cumsum(lengths) - lengths)[documents]
            inputs = (torch.from_numpy(x)[None] for x in (tokens, labels, positions, documents))
            loss, num = model(*inputs)
            packed, count = packed + loss.item(), count + num.item()
        alone, expected = 0.0, 0
        for text in texts:
            ids = torch.tensor([[*(ord(c) - ord("a") for c in text), BYTES.end]])
            labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
            loss, num = model(ids, labels, torch.arange(ids.shape[1])[None])
            alone, expected = alone + loss.item(), expected + num.item()
    assert count == expected and packed / count == pytest.approx(alone / expected, abs=1e-6)


def test_ranks_and_epochs_read_the_same_windows(tmp_path: Path) -> None:
    data = Dataset(data_options(tmp_path, 64, packing="best_fit"), BYTES, 0)
    source = data.sources[0]
    assert isinstance(source, PackedCorpus) and isinstance(data.windows([(0, 0)]).tokens, torch.Tensor)
    whole = data.batch([0, 1, 2])
    for rank in range(2):
        half = data.batch([0, 1, 2], torch.arange(rank * 32, rank * 32 + 32))
        assert torch.equal(half.tokens, whole.tokens[:, rank * 32 : rank * 32 + 32]) and half.checksums == whole.checksums
    epochs = [
        [source.window(e * source.num_windows + i, np.arange(64)).tokens.tolist() for i in range(source.num_windows)]
        for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert "data.sources.text, " in data.origin(0)
    assert type(Dataset(data_options(tmp_path, 64), BYTES, 0).sources[0]) is Corpus
