"""Evaluation: its numbers equal a direct count over full windows, for any split into ranks."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ringspan import Layout
from ringspan.trainer.config.schema import Config, Data, Evaluate, Model, Source, TokenizerOptions
from ringspan.trainer.data import tokenizer
from ringspan.trainer.data.dataset import Dataset
from ringspan.trainer.evaluation import held_out as module
from ringspan.trainer.evaluation.held_out import Table, bar, evaluate, position_edges
from ringspan.trainer.model import GPT

LENGTH = 512
CPU = torch.device("cpu")
BYTES = tokenizer.load(TokenizerOptions())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i}: " + "abcdefgh" * (3 * (i % 7) + 1))
    sources = {
        "text": Source(kind="text", paths=[str(tmp_path / "*.txt")]),
        "recall": Source(kind="recall"),
        "passkey": Source(kind="passkey", digits=2),
    }
    data = Data(length=LENGTH, batch=3, micro_batch=2, sources=sources, cache=str(tmp_path / "cache"), held_out=0.3)
    return Config(data=data, evaluate=Evaluate(batches=3, bins=6))


@pytest.fixture
def held_out(config: Config) -> Dataset:
    return Dataset(config.data, BYTES, 0, "held_out")


class Oracle:
    """A fake model for ranks that run one after another: it predicts the labels of `right` and misses all others."""

    def __init__(self, right) -> None:
        self.right, self.calls = right, 0

    def __call__(self, tokens, labels, positions, documents, seeds, each):
        assert each
        self.calls += 1
        valid = labels != -100
        losses = torch.where(valid, (positions + 1).float().log(), 0)
        return losses.sum(), valid.sum(), losses, self.right(tokens, labels) & valid


def all_right(tokens, labels):
    return labels == labels


def test_perfect_and_useless_models_score_1_and_0(config: Config, held_out: Dataset) -> None:
    for right, score in ((all_right, 1.0), (lambda tokens, labels: labels < -1000, 0.0)):
        report = evaluate(Oracle(right), held_out, config, torch.arange(LENGTH), torch.device("cpu"))
        scores = [mean for table in report.tables if table.chance is not None for mean in table.means]
        assert len(scores) > 10 and set(scores) == {score}
        assert report.chance == {"recall": 1 / 8}


def test_numbers_equal_a_direct_count(config: Config, held_out: Dataset) -> None:
    model = GPT(Model(vocabulary=320, layers=1, dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=32, init_std=0.2))
    report = evaluate(partial(model), held_out, config, torch.arange(LENGTH), torch.device("cpu"))
    for source, name in enumerate(held_out.names):
        batch = held_out.windows([(source, number) for number in range(3)])
        with torch.no_grad():
            loss, count, losses, hits = model(*batch.inputs[:4], each=True)
        assert report.sources[name] == pytest.approx(loss.item() / count.item(), rel=1e-5)
        if name == "text":
            assert report.loss == report.sources[name]
            table, valid = report.tables[0], batch.labels != -100
            assert sum(table.counts) == count
            assert np.dot(table.means, table.counts) == pytest.approx(loss.item(), rel=1e-5)
            assert table.labels[0] == "0-1"
            assert table.means[0] == pytest.approx(losses[valid & (batch.positions < 2)].mean().item(), rel=1e-5)
        else:
            table = report.tables[source]
            answers = [held_out.sources[source].answers(number) for number in range(3)]
            right = [hits[row].numpy()[answer.positions].all(1) for row, answer in enumerate(answers)]
            assert np.dot(table.means, table.counts) == pytest.approx(sum(x.sum() for x in right))
            assert sum(table.counts) == sum(map(len, right))


def test_recall_by_distance(config: Config, held_out: Dataset) -> None:
    """A model that recalls only facts less than a quarter of the window back."""

    def near(tokens, labels):
        right = torch.zeros_like(labels, dtype=torch.bool)
        for row, column in zip(*torch.nonzero(labels >= 0, as_tuple=True), strict=True):
            right[row, column] = (tokens[row, max(0, column - 127) : column] == labels[row, column]).any()
        return right

    report = evaluate(Oracle(near), held_out, config, torch.arange(LENGTH), torch.device("cpu"))
    table = next(table for table in report.tables if table.title == "recall: right by distance")
    assert table.labels[:3] == ["1-63", "64-127", "128-191"]
    assert table.means == [1.0, 1.0] + [0.0] * (len(table.means) - 2) and len(table.means) >= 6
    assert report.far == {}  # on one rank nothing is further away than its tokens
    half = evaluate(Oracle(near), held_out, config, torch.arange(256), torch.device("cpu"))
    assert half.far == {"recall": 1.0}  # without a reduction the other rank's answers count as right


@pytest.mark.parametrize(("kind", "ranks"), [("zigzag", 2), ("contiguous", 3), ("striped", 2)])
@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_report_is_equal_for_any_split_into_ranks(
    config: Config, held_out: Dataset, kind: str, ranks: int, data_size: int
) -> None:
    """The ranks run one after another: the first pass collects their sums, the second returns the total to each."""
    layout = Layout(kind, length=LENGTH, ranks=ranks)
    odd = lambda tokens, labels: (labels + tokens) % 2 == 0  # noqa: E731
    expected = evaluate(Oracle(odd), held_out, config, torch.arange(LENGTH), torch.device("cpu"))
    collected, calls = [], set()
    for reduce in (lambda sums: (collected.append(sums), sums)[1], lambda sums: sum(collected)):
        for data_rank in range(data_size):
            for rank in range(ranks):
                oracle = Oracle(odd)
                positions = layout.positions(rank)
                report = evaluate(oracle, held_out, config, positions, torch.device("cpu"), data_rank, data_size, reduce)
                calls.add(oracle.calls)
    assert len(calls) == 1  # every rank runs the same number of forwards
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    for table, reference in zip(report.tables, expected.tables, strict=True):
        assert (table.labels, table.counts) == (reference.labels, reference.counts)
        assert table.means == pytest.approx(reference.means, rel=1e-6)
    assert set(report.far) == {"recall"} and 0 <= report.far["recall"] <= 1


def test_far_counts_facts_beyond_one_ranks_tokens(config: Config, held_out: Dataset) -> None:
    """A model that sees only its own rank's tokens recalls none of them in a contiguous layout."""
    answers = [held_out.sources[1].answers(number) for number in range(3)]
    assert sum(int((answer.distance > 256).sum()) for answer in answers) > 20
    layout = Layout("contiguous", length=LENGTH, ranks=2)
    collected = []

    def collect(sums):
        collected.append(sums)
        return sums

    for rank in (0, 1):
        oracle = Oracle(lambda tokens, labels: torch.isin(labels, tokens))
        evaluate(oracle, held_out, config, layout.positions(rank), torch.device("cpu"), reduce=collect)
    report = evaluate(oracle, held_out, config, layout.positions(0), torch.device("cpu"), reduce=lambda sums: sum(collected))
    assert report.far["recall"] == 0.0


def test_needles_by_family_and_depth(config: Config) -> None:
    source = Source(kind="needles", families=["single", "variables"], num_questions=3)
    config.data.length, config.data.sources = 1024, {"needles": source}
    report = evaluate(Oracle(all_right), Dataset(config.data, BYTES, 0, "held_out"), config, torch.arange(1024), CPU)
    assert report.tables[0].title == "needles: right by family and depth" and report.chance == {"needles": pytest.approx(1 / 3)}
    assert set(report.tables[0].means) == {1.0} and sum(report.tables[0].counts) == 9 * 3
    assert {label.split()[0] for label in report.tables[0].labels} == {"single", "variables"}


def test_bars_and_tables_are_plain_text(config: Config, held_out: Dataset) -> None:
    assert bar(1) == "█" * module.WIDTH and bar(0) == "" and bar(0.5 + 1 / 320) == "█" * 20 + "▏"
    text = Table("loss", ["0", "1-9"], [4.0, 2.0], [1, 9]).text()
    assert text.splitlines() == ["loss", "    0  4.000  " + "█" * 40, "  1-9  2.000  " + "█" * 20]
    assert "(chance 12.5%)" in Table("right", ["a"], [0.5], [10], 0.125).text()
    assert [Table("right", ["a"], [0.0], [n], 0.125).text().endswith(f"  of only {n}") for n in (9, 10)] == [True, False]
    report = evaluate(Oracle(all_right), held_out, config, torch.arange(LENGTH), torch.device("cpu"))
    assert report.text().count("\n\n") == 2
    assert all(isinstance(value, float) for value in report.metrics().values())
    assert {"loss", "loss/text", "recall: right by distance/1-63"} <= set(report.metrics())


@pytest.mark.parametrize("length", [2, 16, 1000, 2**20])
def test_position_bins_cover_the_length_and_grow(length: int) -> None:
    edges = position_edges(length, 16)
    assert edges[0] == 0 and edges[-1] < length and len(edges) <= 16 and (np.diff(edges) > 0).all()
