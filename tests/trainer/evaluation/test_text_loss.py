"""Losses on text: a model that uses distant tokens gains from full context, one that does not has equal losses."""

import numpy as np
import pytest
import torch

from ringspan.trainer.data.dataset import NO_LABEL, Dataset, PackedCorpus
from ringspan.trainer.evaluation import text_loss
from tests.trainer.data.helpers import BYTES, data_options, stream

CPU = torch.device("cpu")
LENGTH, CONTEXT = 256, 16


@pytest.fixture
def data(tmp_path) -> Dataset:
    data = Dataset(data_options(tmp_path, LENGTH), BYTES, 0)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), size)) for size in (700, 300, 90, 40)]
    data.sources[0] = PackedCorpus(stream(*texts), LENGTH, seed=0)
    return data


class Counting:
    """A model whose loss of a token is a function of its document position, and which counts its labels."""

    def __init__(self, loss) -> None:
        self.loss, self.shapes = loss, []

    def __call__(self, tokens, labels, positions, documents, seeds, each):
        self.shapes.append(tuple(tokens.shape))
        return None, None, torch.where(labels != NO_LABEL, self.loss(tokens, positions), 0), labels >= 0


def test_losses_with_full_and_short_context(data: Dataset) -> None:
    flat = text_loss.text_loss(Counting(lambda tokens, positions: torch.full(tokens.shape, 2.0)), data, 99, CONTEXT, CPU)
    assert flat["loss"] == flat["full"] == flat["short"] == 2.0 and flat["windows"] == data.sources[0].num_windows
    assert flat["far"] == 3 * LENGTH // 2 + (701 - 2 * LENGTH - LENGTH // 2 - 1)  # three whole windows, and the rest of 701
    model = Counting(lambda tokens, positions: 1.0 / (1 + positions))
    row = text_loss.text_loss(model, data, 99, CONTEXT, CPU)
    assert row["full"] < 1 / 128 and 1 / 32 <= row["short"] <= 1 / 17  # each sees 16 to 32 tokens
    assert set(model.shapes) == {(1, LENGTH), (LENGTH // 2 // CONTEXT, 2 * CONTEXT)}


def test_short_windows_hold_the_same_tokens_and_labels(data: Dataset) -> None:
    for number in range(data.sources[0].num_windows):
        batch = data.windows([(0, number)])
        cut, counted = text_loss.short_windows(batch, CONTEXT)
        chosen = (batch.labels != NO_LABEL) & (batch.positions >= LENGTH // 2)
        assert cut.labels[torch.from_numpy(counted)].tolist() == batch.labels[chosen].tolist()
        assert cut.tokens[torch.from_numpy(counted)].tolist() == batch.tokens[chosen].tolist()
        assert (cut.positions[torch.from_numpy(counted)] >= CONTEXT).all()


def test_a_context_that_does_not_divide_the_length_is_named(data: Dataset) -> None:
    with pytest.raises(ValueError, match=r"context=100, length=256: take a context whose double divides the length"):
        text_loss.text_loss(Counting(None), data, 1, 100, CPU)


def test_the_table() -> None:
    rows = [dict(length=64, loss=1.5, far=10, full=1.25, short=None, context=8)]
    assert text_loss.report(rows).splitlines()[2].split() == ["64", "1.500", "10", "1.250", "-", "8", "to", "16", "tokens"]
