"""Learning rate schedules, the warning about a jump, and parameter groups."""

import re

import pytest
import torch
from torch import nn

from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config, Optim, Schedule
from ringspan.trainer.optim import learning_rate_fraction, learning_rate_jump, parameter_groups


def rates(steps: int, **options) -> list[float]:
    return [learning_rate_fraction(Schedule(**options), step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_rises_to_its_peak(kind: str) -> None:
    fractions = rates(100, kind=kind)
    assert fractions[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(fractions) == 1.0 and fractions[9:] == sorted(fractions[9:], reverse=True)
    assert fractions[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_shapes_between_peak_and_floor() -> None:
    assert rates(100, kind="cosine", warmup=0, floor=0.0)[49] == pytest.approx(0.5)
    assert rates(100, kind="linear", warmup=0, floor=0.0)[74] == pytest.approx(0.25)
    wsd = rates(100, kind="wsd", warmup=10, decay=0.2, floor=0.0)
    assert wsd[9:80] == [1.0] * 71 and wsd[89] == pytest.approx(0.5) and wsd[99] == pytest.approx(0.0)


def test_shortest_runs_and_longest_warmup() -> None:
    assert rates(1, kind="cosine") == [1.0]
    assert rates(5, warmup=5)[-1] == 1.0
    assert len([x for x in rates(50_000, kind="constant") if x < 1]) == 999


def config_of(steps: int, lr: float = 3e-4, optimizer: str = "adamw", **schedule) -> Config:
    return Config(steps=steps, optim=Optim(kind=optimizer, lr=lr), schedule=Schedule(**schedule))


def test_jump_is_a_warning_with_options_that_avoid_it() -> None:
    warning = learning_rate_jump(config_of(100), config_of(200), 100)
    assert "lr goes from 3.0e-5 to 1.9e-4: the schedule is cosine over 200 steps" in warning
    assert (
        "schedule=constant schedule.warmup=0 optim.lr=3e-05 keeps" in warning
        and "schedule=wsd" in warning
        and "muon" not in warning
    )
    assert "optim.muon_lr=0.002 keeps" in learning_rate_jump(
        config_of(100, optimizer="muon"), config_of(200, optimizer="muon"), 100
    )
    warm = learning_rate_jump(config_of(100, kind="constant"), config_of(2000, kind="constant"), 100)
    assert "from 3.0e-4 to 1.5e-4" in warm, "the warmup repeats"
    assert "keeps" not in learning_rate_jump(config_of(100, floor=0.0), config_of(200, floor=0.0), 100), (
        "a rate of 0 cannot be kept"
    )
    assert "from 3.0e-5 to 3.0e-4" in learning_rate_jump(config_of(100), config_of(200, kind="wsd"), 100)
    assert "from 3.0e-4 to 6.2e-5" in learning_rate_jump(config_of(100, kind="constant"), config_of(200, lr=1e-4), 100), (
        "another peak"
    )


@pytest.mark.parametrize(
    "overrides", [[], ["schedule.floor=0.3"], ["schedule=wsd", "schedule.decay=0.5", "schedule.floor=0.3"]]
)
def test_advised_options_are_valid_and_keep_the_rate(overrides: list[str]) -> None:
    old, new = (compose.load([f"steps={steps}", *overrides], world_size=1).config for steps in (100, 200))
    warning = learning_rate_jump(old, new, 100)
    (advice,) = re.findall(r"\. (schedule=constant .*?) keeps the old rate", warning)
    added, _, without = advice.partition(", without ")
    removed = [*re.findall(r"[\w.]+\.\w+", without), "schedule"]
    kept = [text for text in overrides if text.partition("=")[0] not in removed]
    changed = compose.load(["steps=200", *kept, *added.split()], world_size=1).config
    assert learning_rate_jump(old, changed, 100) == "", warning


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        (config_of(100), config_of(100), 50),
        (config_of(1, kind="constant"), config_of(2, kind="constant"), 1),
        (config_of(100), config_of(101), 50),
        (config_of(100), config_of(50), 60),  # it only reports
        (config_of(100, kind="constant"), config_of(200, kind="constant"), 100),
        (config_of(100, kind="wsd"), config_of(200, kind="wsd"), 80),
    ],
)
def test_small_jumps_are_no_warning(old: Config, new: Config, step: int) -> None:
    assert learning_rate_jump(old, new, step) == ""


def test_vectors_do_not_decay_and_muon_takes_the_matrices_of_the_layers() -> None:
    model = nn.ModuleDict(dict(embedding=nn.Embedding(9, 8), layers=nn.ModuleList([nn.Linear(8, 8)]), norm=nn.LayerNorm(8)))
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = parameter_groups(model.named_parameters(), Optim())
    decaying = {names[id(w)] for group in groups if group["weight_decay"] for w in group["params"]}
    assert decaying == {"embedding.weight", "layers.0.weight"}
    assert sum(len(group["params"]) for group in groups) == len(names)
    muon = [group for group in parameter_groups(model.named_parameters(), Optim(kind="muon")) if group["use_muon"]]
    assert [names[id(w)] for group in muon for w in group["params"]] == ["layers.0.weight"] and muon[0]["peak"] == 0.02
    assert isinstance(muon[0]["params"][0], torch.nn.Parameter)
