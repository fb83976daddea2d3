"""Options that change what a checkpoint means are found by field, and accepted by name."""

import copy
import functools
from typing import Any

import pytest

from ringspan.trainer.checkpoint import compatibility
from ringspan.trainer.config import compose
from ringspan.trainer.data import tokenizer

BASE = ["data=recall", "model.heads=4", "model.kv_heads=4", "model.head_dim=16", "model.dim=64", "parallel.device=cpu"]


@functools.cache
def described(*changes: str) -> dict[str, Any]:
    config = tokenizer.resolve_config(compose.load([*BASE, *changes]).config)
    return compatibility.describe(config, config.model)


def changed(*changes: str, weights_only: bool = False) -> list[str]:
    return list(compatibility.differences(described(), described(*changes), weights_only))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (["model.heads=2", "model.kv_heads=2", "model.head_dim=32"], ["model.head_dim", "model.heads", "model.kv_heads"]),
        (["model.norm=layernorm"], ["model.norm"]),
        (["model.norm_eps=0.5"], ["model.norm_eps"]),
        (["model.logit_softcap=1"], ["model.logit_softcap"]),
        (["model.softcap=0.01"], ["model.softcap"]),
        (["model.windows=[8]"], ["model.windows"]),
        (["rope.base=100"], ["rope.base"]),
        (["rope=linear"], ["rope.factor", "rope.kind"]),
        (["data.length=64"], ["data.length"]),
        (["data.held_out=0.1"], ["data.held_out"]),
        (["data.sources.recall.facts=0.1"], ["data.sources.recall.facts"]),
        (["seed=3"], ["seed"]),
    ],
)
def test_options_of_meaning_are_differences(change: list[str], keys: list[str]) -> None:
    assert changed(*change) == keys
    assert changed(*change, weights_only=True) == [key for key in keys if key.startswith(("model", "rope"))]


def test_a_new_source_is_a_difference() -> None:
    assert "data.sources.more.kind" in changed("data.sources.more.kind=passkey")


@pytest.mark.parametrize(
    "change",
    ["optim.lr=1e-3", "steps=7", "data.batch=2", "model.dropout=0.1", "model.init_std=1", "model.name=x", "model.windows=[0,0]",
     "model.head_dim=0", "parallel.ring=1", "data.prefetch=0"],
)  # fmt: skip
def test_options_of_training_may_change(change: str) -> None:
    assert changed(change) == []


def test_paths_may_change() -> None:
    old, new = (described("data=text", f"data.sources.text.paths=[{name}]") for name in ("README.md", "Makefile"))
    assert compatibility.differences(old, new) == {}


def test_what_an_older_checkpoint_lacks_is_not_compared() -> None:
    old = copy.deepcopy(described())
    del old["data"], old["model"]["softcap"]
    assert compatibility.differences(old, described("seed=3", "model.norm_eps=0.5")).keys() == {"model.norm_eps"}
    assert compatibility.differences(old, described("model.softcap=3")).keys() == {"model.softcap"}, "it had the default"
    assert compatibility.differences({}, described()) == {}


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"layers": "many", "windows": "x", "heads": None}])
def test_forged_options_are_differences_and_no_errors(value: Any) -> None:
    for key in described():
        forged = copy.deepcopy(described())
        forged[key] = value
        assert all(isinstance(text, str) for text in compatibility.differences(forged, described()).values())
    forged = copy.deepcopy(described())
    forged["model"]["heads"] = value
    assert "model.heads" in compatibility.differences(forged, described())


def test_accepted_names_are_options_and_groups() -> None:
    assert compatibility.is_accepted("rope.base", ["rope"]) and compatibility.is_accepted("rope.base", ["rope.base"])
    assert not compatibility.is_accepted("rope.base", ["rope.ba", "model"])
    names = ["rope", "data.length", "data.sources", "data.sources.recall", "seed", "model.windows", "tokenizer", "data"]
    compose.load([*BASE, f"checkpoint.changed=[{','.join(names)}]"])
    with pytest.raises(compose.ConfigError, match=r"checkpoint.changed=\[rope.bas\]: .*do you mean rope.base\?"):
        compose.load([*BASE, "checkpoint.changed=[rope.bas]"])
