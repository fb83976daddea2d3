"""The choice of a memory plan: the fastest that fits, next smaller ones, the longest sequence, the fewest GPUs."""

import time
from dataclasses import replace

import pytest

from ringspan.trainer.memory.plan import NONE
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import GIB
from ringspan.trainer.planning.plans import Planner, fewest_gpus, longest_sequence
from tests.trainer.planning.configs import planned

H200 = replace(MACHINES["h200"], host=512 * GIB)


def planner(*overrides: str, host: float = 512, memory: float = 139.8, world: int = 4) -> Planner:
    return Planner(planned(*overrides), world, replace(H200, host=host * GIB, memory=memory * GIB))


def test_plan_with_much_memory_keeps_everything() -> None:
    step = planner(memory=10_000).choose()
    assert step.plan == NONE and step.fits


def test_less_memory_gives_a_slower_plan() -> None:
    """From the fastest plan to the one of least memory, each choice fits and none is faster than the one before."""
    sizes = [400, 139.8, 80, 60, 55, 52]
    planners = [planner(memory=size, host=32) for size in sizes]
    steps = [each.choose() for each in planners]
    assert all(step.fits and step.need.peak <= each.target.usable for step, each in zip(steps, planners, strict=True))
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds) and len(set(seconds)) > 3
    assert not planner(memory=30).choose().fits


def test_no_plan_of_the_candidates_that_fits_is_faster_than_the_chosen_one() -> None:
    for options in (["data.length=1048576"], ["data.length=524288", "engine.zero=1", "model.layers=8"]):
        chosen = planner(*options)
        step = chosen.choose()
        for plan in chosen._candidates():
            other = chosen.step(plan)
            assert not other.fits or other.seconds >= step.seconds * (1 - 1e-9)


def test_host_memory_is_used_only_where_it_is_needed() -> None:
    near, far = planner().choose(), planner("data.length=1048576").choose()
    assert near.need.on_host == 0 and far.need.on_host > 0
    fewer = replace(far.plan, outs_on_host=far.plan.outs_on_host - 1)
    if far.plan.inputs_on_host:
        fewer = replace(far.plan, inputs_on_host=far.plan.inputs_on_host - 1)
    assert not planner("data.length=1048576").step(fewer).fits
    without = planner("data.length=1048576", host=1).choose()
    assert without.need.on_host == 0 and without.seconds > far.seconds


def test_least_needs_less_than_any_other_plan() -> None:
    small = planner("engine.memory=least", "data.length=1048576")
    step = small.choose()
    assert step.fits and step.need.peak == min(small.step(plan).need.peak for plan in [step.plan, *small._candidates()])


def test_tensors_are_fetched_late_where_they_fit_only_then() -> None:
    """Two layers of 8B's width at a million tokens on 80 GB: attention's forward still runs once."""
    options = ["model.layers=2", "data.length=1048576", "engine.zero=1"]
    step = planner(*options, memory=79.1, host=125, world=1).choose()
    assert step.fits and step.plan.late and step.plan.outs == 2
    assert planner(*options, memory=120, host=125, world=1).choose().plan.late is False


def test_alternatives_keep_other_tensors_and_are_slower() -> None:
    steps = planner("data.length=1048576").fastest(3)
    assert len({(step.plan.segment, step.plan.outs) for step in steps}) == 3
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps) and all(step.fits for step in steps)


def test_next_plan_after_an_out_of_memory_error_is_clearly_smaller() -> None:
    full = planner("data.length=1048576")
    chosen = full.choose()
    smaller = full.next_smaller(chosen.plan)
    assert smaller is not None and smaller.fits and smaller.need.peak <= 0.9 * chosen.need.peak
    assert full.next_smaller(full.least().plan) is None


def test_groups_of_heads_are_divisible_by_ulysses() -> None:
    plans = list(
        planner(
            "parallel.ulysses=2", "parallel.ring=2", "model.kv_heads=8", "model.heads=8", "model.head_dim=128"
        )._candidates()
    )
    assert {plan.heads for plan in plans} == {0, 4, 2}


def test_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    config = planned()
    longest = longest_sequence(config, 4, H200)

    def fits(length: int) -> bool:
        return Planner(replace(config, data=replace(config.data, length=length)), 4, H200).choose().fits

    assert fits(longest) and not fits(longest * 17 // 16)
    assert longest_sequence(config, 4, replace(H200, memory=GIB)) == 0
    assert longest_sequence(planned("engine.memory=x/1 outs=32"), 4, H200) < longest


def test_fewest_gpus_fit_and_half_of_them_do_not() -> None:
    config = planned("data.length=2097152")
    fewest = fewest_gpus(config, H200)
    assert Planner(config, fewest, H200).choose().fits and not Planner(config, fewest // 2, H200).choose().fits
    assert fewest_gpus(config, replace(H200, memory=GIB)) == 0


@pytest.mark.parametrize("length", ["1M", "4M"])
def test_planning_is_fast(length: str) -> None:
    """On 64 GPUs, where most of the candidates are tried, in CPU time."""
    config = planned(f"data.length={length}", "parallel.ulysses=4")
    began = time.process_time()
    Planner(config, 64, H200).fastest(3)
    longest_sequence(config, 64, H200)
    fewest_gpus(config, H200)
    assert time.process_time() - began < 1
