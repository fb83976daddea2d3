"""The learning rate of each step, and who decays."""

import re

import pytest
import torch
from torch import nn

from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config, Optim, Schedule
from ringspan.trainer.optim import fraction, groups, jump


def rates(steps: int, **options) -> list[float]:
    return [fraction(Schedule(**options), step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_rises_to_its_peak(kind: str) -> None:
    found = rates(100, kind=kind)
    assert found[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(found) == 1.0 and found[9:] == sorted(found[9:], reverse=True)
    assert found[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_shapes_between_peak_and_floor() -> None:
    assert rates(100, kind="cosine", warmup=0, floor=0.0)[49] == pytest.approx(0.5)
    assert rates(100, kind="linear", warmup=0, floor=0.0)[74] == pytest.approx(0.25)
    wsd = rates(100, kind="wsd", warmup=10, decay=0.2, floor=0.0)
    assert wsd[9:80] == [1.0] * 71 and wsd[89] == pytest.approx(0.5) and wsd[99] == pytest.approx(0.0)


def test_edges() -> None:
    assert rates(1, kind="cosine") == [1.0]
    assert rates(5, warmup=5)[-1] == 1.0
    assert len([x for x in rates(50_000, kind="constant") if x < 1]) == 999


def asked(steps: int, lr: float = 3e-4, optimizer: str = "adamw", **schedule) -> Config:
    return Config(steps=steps, optim=Optim(kind=optimizer, lr=lr), schedule=Schedule(**schedule))


def test_a_rate_that_jumps_is_told_with_what_keeps_it() -> None:
    told = jump(asked(100), asked(200), 100)
    assert "lr goes from 3.0e-5 to 1.9e-4: it is cosine over 200 steps" in told
    assert "schedule=constant schedule.warmup=0 optim.lr=3e-05 keeps" in told and "schedule=wsd" in told and "muon" not in told
    assert "optim.muon_lr=0.002 keeps" in jump(asked(100, optimizer="muon"), asked(200, optimizer="muon"), 100)
    warm = jump(asked(100, kind="constant"), asked(2000, kind="constant"), 100)
    assert "from 3.0e-4 to 1.5e-4" in warm, "a warmup begins again"
    assert "keeps" not in jump(asked(100, floor=0.0), asked(200, floor=0.0), 100), "no rate is 0"
    assert "from 3.0e-5 to 3.0e-4" in jump(asked(100), asked(200, kind="wsd"), 100)
    assert "from 3.0e-4 to 6.2e-5" in jump(asked(100, kind="constant"), asked(200, lr=1e-4), 100), (
        "of another run, with its peak"
    )


@pytest.mark.parametrize("more", [[], ["schedule.floor=0.3"], ["schedule=wsd", "schedule.decay=0.5", "schedule.floor=0.3"]])
def test_what_is_said_to_keep_a_rate_is_taken_and_keeps_it(more: list[str]) -> None:
    old, new = (compose.load([f"steps={steps}", *more], world_size=1).config for steps in (100, 200))
    (advice,) = re.findall(r"\. (schedule=constant .*?) keeps it", told := jump(old, new, 100))
    keeping, _, without = advice.partition(", without ")
    left = [text for text in more if text.partition("=")[0] not in [*re.findall(r"[\w.]+\.\w+", without), "schedule"]]
    taken = compose.load(["steps=200", *left, *keeping.split()], world_size=1).config
    assert jump(old, taken, 100) == "", told


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        (asked(100), asked(100), 50),
        (asked(1, kind="constant"), asked(2, kind="constant"), 1),
        (asked(100), asked(101), 50),
        (asked(100), asked(50), 60),  # only its report comes
        (asked(100, kind="constant"), asked(200, kind="constant"), 100),
        (asked(100, kind="wsd"), asked(200, kind="wsd"), 80),
    ],
)
def test_a_rate_that_hardly_jumps_is_not_told(old: Config, new: Config, step: int) -> None:
    assert jump(old, new, step) == ""


def test_norms_biases_and_sinks_do_not_decay_and_muon_takes_the_layers_matrices() -> None:
    model = nn.ModuleDict(dict(embedding=nn.Embedding(9, 8), layers=nn.ModuleList([nn.Linear(8, 8)]), norm=nn.LayerNorm(8)))
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = groups(model.named_parameters(), Optim())
    decaying = {names[id(w)] for group in found if group["weight_decay"] for w in group["params"]}
    assert decaying == {"embedding.weight", "layers.0.weight"}
    assert sum(len(group["params"]) for group in found) == len(names)
    muon = [group for group in groups(model.named_parameters(), Optim(kind="muon")) if group["use_muon"]]
    assert [names[id(w)] for group in muon for w in group["params"]] == ["layers.0.weight"] and muon[0]["peak"] == 0.02
    assert isinstance(muon[0]["params"][0], torch.nn.Parameter)
