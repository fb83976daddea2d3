"""Synthetic tasks: where facts, questions and answers are, and which ids the tasks use."""

import numpy as np

from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data.dataset import Dataset
from tests.trainer.data.helpers import BYTES, BytesWithBegin


def test_recall_asks_only_for_earlier_facts_and_labels_only_answers() -> None:
    data = Dataset(Data(length=400, sources={"r": Source(kind="recall", keys=5, values=7)}), BYTES, seed=0)
    task = data.sources[0]
    for number in range(20):
        batch, answers = data.windows([(0, number)]), task.answers(number)
        tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
        assert sorted(np.flatnonzero(labels >= 0)) == sorted(answers.positions[:, 0]) and len(answers.positions) > 50
        assert (tokens[answers.fact] == labels[answers.positions[:, 0]]).all() and (answers.distance > 0).all()
        facts = np.flatnonzero(tokens >= 256 - 35)
        assert facts.max() < 100 and len(np.unique(tokens[facts])) == 5  # one value per key, all in the first quarter
        for position, fact in zip(answers.positions[:, 0], answers.fact, strict=True):
            assert not (tokens[fact + 1 : position] == labels[position]).any()  # the most recent fact of the key
    assert task.answers(0).distance.max() > 300


def test_passkey_hides_a_number_at_any_depth_in_texts_of_several_lengths() -> None:
    data = Dataset(Data(length=1024, sources={"p": Source(kind="passkey", digits=4)}), BYTES, seed=0)
    depths = []
    for number in range(20):
        batch, answers = data.windows([(0, number)]), data.sources[0].answers(number)
        assert sorted(answers.length) == [256, 256, 512] and batch.lengths == answers.length.tolist()
        for positions, fact, length in zip(answers.positions, answers.fact, answers.length, strict=True):
            key = BYTES.decode(batch.labels[0, positions].tolist())
            begin = int(positions[-1]) + 3 - length
            text = BYTES.decode(batch.tokens[0, begin : positions[-1] + 2].tolist())
            assert text.count(f"The pass key is{key}") == 2 and text.endswith(f"What is the pass key? The pass key is{key}")
            assert BYTES.decode(batch.tokens[0, : fact + 1].tolist()).endswith(f"{key} is the pass key. ")
        assert int((batch.labels >= 0).sum()) == 3 * 5
        depths += answers.depth.tolist()
    assert min(depths) < 0.1 and max(depths) > 0.9


def test_passkey_texts_have_the_begin_token_and_recall_does_not_use_it() -> None:
    sources = {"passkey": Source(kind="passkey"), "recall": Source(kind="recall")}
    data = Dataset(Data(length=1024, sources=sources), BytesWithBegin(), seed=0)
    for number in range(20):
        batch, answers = data.windows([(0, number)]), data.sources[0].answers(number)
        tokens = batch.tokens[0].numpy()
        ends = np.cumsum(batch.lengths) - 1
        assert np.flatnonzero(tokens == 600).tolist() == [0, *(ends[:-1] + 1)]
        assert np.flatnonzero(tokens == 601).tolist() == ends.tolist()
        for positions, fact in zip(answers.positions, answers.fact, strict=True):
            key = BYTES.decode(batch.labels[0, positions].tolist())
            assert BYTES.decode(tokens[: fact + 1].tolist()).endswith(f"{key} is the pass key. ")
    assert int(data.windows([(1, number) for number in range(64)]).tokens.max()) == 599
