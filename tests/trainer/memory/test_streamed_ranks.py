"""Streamed layers on several gloo ranks: the ring and Ulysses in fp64, and ZeRO 0 to 3, against the plain step of one rank."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.trainer.config.schema import Model
from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines
from tests.trainer.memory.models import OPTIONS, SHAPE, build, difference, gradients

LENGTH = 53  # no number of ranks divides it, so every layout pads
PLANS = ["x/1 outs=3 heads=1 rows=5", "x/2 rows=7", "x/2@1 outs=2@1 heads=2", "x/3 outs=1 heads=2 rows=4"]


def plans_for(shape: Model, ulysses: int) -> list[str]:
    """The plans whose groups of KV heads the model has, and Ulysses can divide."""
    plans = [text.replace("heads=1", "heads=2") for text in PLANS] if ulysses > 1 else PLANS
    return [text for text in plans if "heads=2" not in text or shape.kv_heads > 1]


def compare_with_one_rank(ring: int, ulysses: int, kind: str, names: list[str], first: int, step: int) -> None:
    """Compare models of these options under every `step`-th plan, two training steps in a row.

    Every rank compares the summed gradients with those of one rank.
    """
    import torch.distributed as dist

    from ringspan import Mesh
    from ringspan.parallel.buffered_attention import BufferedAttention

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = Mesh(1, ring, ulysses)
    layout = mesh.layout(kind, LENGTH)
    positions = layout.positions(mesh.context_rank)
    inside = positions < LENGTH
    generator = torch.Generator().manual_seed(ring)
    for name in names:
        options = OPTIONS[name]
        size = SHAPE | dict(layers=3, kv_heads=4) | options | dict(kv_heads=max(options.get("kv_heads", 4), ulysses))
        shape = Model(**size)
        attention = BufferedAttention(layout, mesh, backend="chunked")
        batches = []
        for number in range(2):
            tokens = torch.randint(97, (2, LENGTH), generator=generator)
            documents = torch.arange(LENGTH).ge(20).long() if number else None
            batches.append((tokens, tokens.roll(-1, 1), documents, torch.tensor([3, 4]) + number if shape.dropout else None))
        plain = build("none", shape, LENGTH, 2)
        everywhere = torch.arange(LENGTH).expand(2, -1)
        expected = [gradients(plain, *batch[:2], everywhere, *batch[2:]) for batch in batches]
        index = positions.clamp(max=LENGTH - 1)
        for text in plans_for(shape, ulysses)[first::step]:
            model = build(text, shape, len(positions), 2, attention=attention)
            for (tokens, labels, *rest), (value, exact) in zip(batches, expected, strict=True):
                local = torch.where(inside, labels[:, index], -100)
                found, grads = gradients(model, tokens[:, index], local, positions.expand(2, -1), *rest)
                total = torch.tensor(found, dtype=torch.float64)
                dist.all_reduce(total)
                for gradient in grads.values():
                    dist.all_reduce(gradient)
                where = f"{text} {options}"
                assert abs(float(total) - value) <= 1e-12 * abs(value), where
                assert difference(grads, exact) <= 1e-12, (where, difference(grads, exact))


@pytest.mark.parametrize(
    ("ring", "ulysses", "kind", "names"),
    [
        (2, 1, "zigzag", ["q/k-norm, sinks, softcap", "one KV head"]),
        (3, 1, "contiguous", ["LayerNorm, GELU, biases"]),
        (4, 1, "striped", ["dropout, windows, tied"]),
        (1, 2, "contiguous", ["dropout, windows, tied"]),
        (2, 2, "zigzag", ["q/k-norm, sinks, softcap"]),
    ],
)
def test_gradients_equal_those_of_one_rank(ring: int, ulysses: int, kind: str, names: list[str]) -> None:
    world = ring * ulysses
    assert jobs.run_ranks(world, compare_with_one_rank, ring, ulysses, kind, names, 0, 2) == [0] * world


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
def test_gradients_of_every_model_plan_and_split(ring: int, ulysses: int, kind: str) -> None:
    """Each model is in a third of the splits, and in another third for each kind of layout."""
    if kind == "striped" and ulysses > 1:
        pytest.skip("striped does not support ulysses")
    world = ring * ulysses
    first = ("zigzag", "contiguous", "striped").index(kind) + ring + ulysses
    names = [name for number, name in enumerate(OPTIONS) if (number + first) % 3 == 0]
    assert jobs.run_ranks(world, compare_with_one_rank, ring, ulysses, kind, names, 0, 1) == [0] * world


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Metrics of two ranks under the plan `none`, by ZeRO stage."""
    root = tmp_path_factory.mktemp("plain")
    return cache(lambda zero: train(root / str(zero), zero, "none"))


def train(folder: Path, zero: int, plan: str) -> list[dict[str, Any]]:
    options = [f"runs={folder}", "name=run", "steps=2", f"engine.zero={zero}", f"engine.memory={plan}", "checkpoint=none"]
    assert jobs.run_ranks(2, jobs.train, [*options, "evaluate.batches=0", "debug.deterministic=true"]) == [0, 0]
    return lines(folder / "run")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", ["x/2@1 outs=1@1 heads=1 rows=20"])
def test_training_equals_that_of_the_plan_none(
    plain: Callable[[int], list[dict[str, Any]]], tmp_path: Path, zero: int, plan: str
) -> None:
    """In fp32, with two micro-batches per step; sums of chunks are rounded in another order."""
    for step, expected in zip(train(tmp_path, zero, plan), plain(zero), strict=True):
        for key in ("loss", "grad"):
            assert step[key] == pytest.approx(expected[key], rel=1e-6), key
