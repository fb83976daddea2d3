"""Plans of offloading: host memory by term, the fit on a host, and the stated assumptions."""

import re
from dataclasses import replace

import pytest

from ringspan.trainer import check
from ringspan.trainer.memory.plan import MemoryPlan
from ringspan.trainer.planning import memory
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import GIB, footprint
from ringspan.trainer.planning.plans import Planner
from tests.trainer.planning.configs import BIG, planned


@pytest.mark.parametrize(("size", "allocated"), [(1, 1), (2**20, 2**20), (2**20 + 1, 2**21)])
def test_pinned_memory_is_a_power_of_two(size: int, allocated: int) -> None:
    assert memory.pinned_size(size) == allocated


def test_host_memory_by_term() -> None:
    P = 8_030_261_248
    share, GB4, GB8 = P / 4, 2**32, 2**33  # pinned: 2·P/4 and 4·P/4 bytes
    assert footprint(planned(), 4).offloaded == {}
    inputs = footprint(planned("data.length=262145"), 4, plan=MemoryPlan(1, inputs_on_host=32)).offloaded
    assert inputs == {"kept by layers": 32 * 65537 * 4096 * 2}
    everything = footprint(planned("engine=offload"), 4)
    assert everything.offloaded["weights"] == GB4 and everything.offloaded["optimizer"] == 12 * share
    assert everything.offloaded["gradients"] == 2 * GB8
    assert everything.on_host == sum(everything.offloaded.values())
    optimizer = ["engine.offload_optimizer=true", "engine.zero=2"]
    assert footprint(planned(*optimizer), 4).offloaded == {"optimizer": 8 * share + GB8 + GB4, "gradients": GB8}
    assert footprint(planned(*optimizer, "data.batch=2"), 4).offloaded["gradients"] == GB8 + 2 * share


def test_offloading_on_a_cpu_changes_nothing() -> None:
    target = replace(MACHINES["h200"], gpu=False, memory=30 * GIB)
    planner = Planner(planned(), 4, target)
    assert not planner.least().need.offloaded and not planner.least().plan.inputs_on_host


def test_host_memory_must_hold_the_offloaded_tensors_of_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["experiment=llama_8b_1m", "hardware=h200", "hardware.gpus=4", "engine.memory=x/1@32 outs=32 rows=8192 heads=1"]
    assert check.main(plan) == 0
    unknown = capsys.readouterr().out
    assert re.search(r"all, 4 ranks per host +256.00  the host's memory is unknown: set hardware.host_gib", unknown)
    assert check.main([*plan, "hardware.host_gib=512"]) == 0
    assert "256.00  of 486 GiB for tensors (512 in all): it fits" in capsys.readouterr().out
    assert check.main([*plan, "hardware.host_gib=256"]) == 1
    too_small = capsys.readouterr().out
    assert "256.00  of 230 GiB for tensors (256 in all): IT DOES NOT FIT" in too_small
    assert "lacks 6.5 GiB of host memory per rank (it needs 64.0, 57.5 are available)" in too_small
    assert "  engine.memory=auto: " in too_small
    longest = next(line for line in too_small.splitlines() if "longest sequence" in line)
    assert longest not in unknown
    assert check.main([*plan, "hardware.gpus=16", "hardware.host_gib=256"]) == 0
    assert re.search(r"all, 8 ranks per host +128.00", capsys.readouterr().out)
    assert check.main([*BIG, "hardware.host_gib=128", "engine.offload_optimizer=true"]) == 1
    assert "engine.offload_optimizer=false: " in capsys.readouterr().out
    assert check.main(BIG) == 0 and "offloaded" not in capsys.readouterr().out


def test_misfit_names_the_missing_memory_and_the_nearest_plan() -> None:
    config = planned("engine.memory=x/1@32")
    target = replace(MACHINES["h200"], host=64 * GIB)
    planner = Planner(config, 4, target)
    text = planner.misfit(planner.choose())
    assert "lacks 6.5 GiB of host memory per rank (it needs 16.0, 9.5 are available)" in text
    assert "; engine.memory='" in text and text.endswith(" fits")
    small = Planner(config, 4, replace(target, memory=20 * GIB))
    text = small.misfit(small.choose())
    assert "GiB on each GPU (it needs" in text and " and 6.5 GiB of host memory" in text
    assert text.endswith("; no plan fits, not even for a short sequence")
    assert planner.misfit(planner.fastest()[0]) == ""


def test_plan_states_the_transfers_that_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    def assumptions(*overrides: str) -> list[str]:
        check.main([*BIG, *overrides])
        lines = capsys.readouterr().out.splitlines()
        words = ("overlap with attention", "ulysses ranks", "the host's optimizer", "as if")
        return [line for line in lines if any(word in line for word in words)]

    ring, heads, offloaded, hosts = assumptions("hardware.gpus=16", "parallel.ulysses=2", "engine.offload_optimizer=true")
    assert "K/V and their gradients" in ring and "exchange of heads" in heads and "offloaded weights" in offloaded
    assert "as if all 16 GPUs were on one host, which has 8" in hosts
    assert assumptions("hardware.gpus=8") == [ring]
    assert assumptions("hardware.gpus=1", "hardware.memory_gib=1000") == []
