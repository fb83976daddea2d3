"""The long suite's scores: of an oracle, of guesses, of a model with half the context, and of real decoding."""

import numpy as np
import pytest
import torch

from ringspan.trainer.config.schema import Model
from ringspan.trainer.data.needles import FAMILIES
from ringspan.trainer.evaluation import long_suite
from ringspan.trainer.generate import generate
from ringspan.trainer.model import GPT
from tests.trainer.data.helpers import BYTES

LENGTH = 8192
CPU = torch.device("cpu")


class Fake:
    """A model that has the label right where `right(tokens, labels)` says so."""

    def __init__(self, right) -> None:
        self.right = right

    def __call__(self, tokens, labels, positions, documents, seeds, each):
        valid = labels != -100
        return torch.zeros(()), valid.sum(), torch.zeros(labels.shape), self.right(tokens, labels) & valid


def answers_of(tokens, labels):
    """Yield (row, positions, text) of each answer."""
    for row, line in enumerate(labels.tolist()):
        begin = None
        for index, label in enumerate([*line, -100]):
            if label != -100 and begin is None:
                begin = index
            if label == -100 and begin is not None:
                yield row, slice(begin, index), tokens[row].tolist()[begin + 1 : index + 1]
                begin = None


def score(right, families=tuple(FAMILIES), sequences=4, length=LENGTH):
    data = long_suite.suite_data(BYTES, length, families)
    return long_suite.score(Fake(right), data, sequences, torch.arange(length), CPU, micro_batch=2)


def test_an_oracle_scores_all_and_a_useless_model_nothing() -> None:
    for right, expected in ((lambda tokens, labels: labels == labels, 1.0), (lambda tokens, labels: labels < -1000, 0.0)):
        rows = score(right)
        assert [row["family"] for row in rows] == list(FAMILIES)
        for row in rows:
            assert row["share"] == expected and row["num"] == 4 * 16 == sum(cell["num"] for cell in row["deciles"])
            assert row["low"] <= expected <= row["high"]
        assert all(cell["share"] in (None, expected) for row in rows for cell in row["deciles"])


def test_an_answer_with_one_wrong_token_is_wrong() -> None:
    def all_but_last(tokens, labels):
        hits = labels != -100
        for row, span, _ in answers_of(tokens, labels):
            hits[row, span.stop - 1] = False
        return hits

    assert all(row["right"] == 0 for row in score(all_but_last))


def test_guesses_are_in_the_interval_around_chance() -> None:
    """A model that answers with a random value of the text is right by chance."""
    rng = np.random.default_rng(0)

    def guess(tokens, labels):
        hits, own = torch.zeros_like(labels, dtype=torch.bool), list(answers_of(tokens, labels))
        for row, span, answer in own:
            text = BYTES.decode(tokens[row, : int(LENGTH * 0.85)].tolist())
            values = [word.strip(".,") for word in text.split() if word.strip(".,").isdigit()]
            hits[row, span] = BYTES.decode(answer).split() == [rng.choice(values)]
        return hits

    for row in score(guess, ("single", "variables"), sequences=40):
        assert row["num"] == 640 and row["low"] <= row["chance"] <= row["high"], row


def test_a_model_that_sees_half_of_the_context_fails_exactly_the_depths_that_it_cannot_see() -> None:
    """The model has the answer right if the needed sentences are in the second half."""

    def right(tokens, labels):
        hits = torch.zeros_like(labels, dtype=torch.bool)
        for row, span, answer in answers_of(tokens, labels):
            visible = bytes(token for token in tokens[row, LENGTH // 2 : span.start - 60].tolist() if token < 256)
            question = bytes(tokens[row, : span.start + 1].tolist()).rpartition(b"\n")[2]
            key = question.rpartition(b"? ")[0].split()[-1]
            facts = visible.partition(b"Which")[0]
            hits[row, span] = bytes(answer) in facts and key in facts
        return hits

    row = score(right, ("single",), sequences=30)[0]
    assert [cell["share"] for cell in row["deciles"][:5]] == [0.0] * 5
    seen = [cell["share"] for cell in row["deciles"][5:] if cell["num"]]
    assert seen[1:] == [1.0] * (len(seen) - 1) and seen[0] > 0.9  # a sentence across the middle is not seen whole


def test_wilson_intervals() -> None:
    assert long_suite.wilson(0, 0) == (0.0, 1.0)
    assert long_suite.wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert long_suite.wilson(0, 500) == pytest.approx((0.0, 0.00762), abs=1e-4) and long_suite.wilson(7, 7)[1] == 1.0


@pytest.mark.parametrize("family", ["single", "two_facts"])
def test_one_forward_scores_as_greedy_decoding_does(family: str) -> None:
    """25 prompts through the paged cache: decoding gives the whole answer exactly where the score says that it is right."""
    torch.manual_seed(0)
    model = GPT(Model(vocabulary=257, layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, mlp_dim=64, init_std=0.3)).eval()
    checked = right = 0
    generator = np.random.default_rng(0)
    source = long_suite.suite_data(BYTES, 1024, [family], num_questions=2).sources[0]
    for number in range(13):
        window, answers = source.window(number, np.arange(1024)), source.answers(number)
        for positions in answers.positions[: 2 if checked < 24 else 1]:
            prompt = window.tokens[: positions[0] + 1].tolist()
            # Half of the answers are what the model says, up to a token that half of these change.
            answer = generate(model, prompt, 3, temperature=0)
            if checked % 2:
                answer[int(generator.integers(3))] = int(generator.integers(257))
            tokens = torch.tensor([prompt + answer])
            labels = torch.full_like(tokens, -100)
            labels[0, len(prompt) - 1 : -1] = tokens[0, len(prompt) :]
            with torch.no_grad():
                hits = model(tokens, labels, torch.arange(tokens.shape[1])[None], each=True)[3]
            scored = bool(hits[0, labels[0] != -100].all())
            assert scored == (generate(model, prompt, 3, temperature=0) == answer)
            checked, right = checked + 1, right + scored
    assert checked == 25 and 10 < right < 15


def test_report_and_figure(tmp_path) -> None:
    rows = score(lambda tokens, labels: labels == labels, ("single", "two_facts"), 1)
    rows += score(lambda tokens, labels: labels < -1000, ("single", "two_facts"), 1, length=16384)
    text = long_suite.report(rows, 8192, ["single"])
    assert "100% (81%-100%)" in text and "16k*" in text and " 8k* " not in text
    assert "two_facts" in text and text.count("transfer: not in the run's data") == 1
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = long_suite.plot(plt, rows, 8192, "title")
    figure.savefig(tmp_path / "x.png")
    plt.close(figure)
    assert (tmp_path / "x.png").stat().st_size > 10_000
