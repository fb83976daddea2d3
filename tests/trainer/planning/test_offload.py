"""What a plan says of hosts: the memory that is offloaded to, and the travel between them."""

import pytest

from ringspan.trainer import check
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.planning import memory as footprint_module
from ringspan.trainer.planning.memory import GIB, footprint, too_much

BIG = ["model=llama-8b", "data.length=262144", "data.batch=1", "engine=zero3", "hardware=h200", "hardware.gpus=4"]


def planned(*overrides: str) -> Config:
    return tokenizer.resolve_config(compose.load([*BIG, *overrides], world_size=4, planning=True).config)


@pytest.mark.parametrize(("size", "taken"), [(1, 1), (2**20, 2**20), (2**20 + 1, 2**21)])
def test_pinned_memory_is_a_power_of_two(size: int, taken: int) -> None:
    assert footprint_module.pinned(size) == taken


def test_what_is_offloaded_is_planned_on_the_host() -> None:
    P = 8_030_261_248
    share, GB4, GB8 = P / 4, 2**32, 2**33  # pinned: 2·P/4 and 4·P/4 bytes
    assert footprint(planned(), 4).offloaded == {}
    inputs = footprint(planned("engine.offload_activations=true", "data.length=262145"), 4).offloaded
    assert inputs == {"checkpoints": 32 * 2**30}  # each 65,537 × 4096 × 2 bytes
    everything = footprint(planned("engine=offload"), 4)
    assert everything.offloaded["weights"] == GB4 and everything.offloaded["optimizer"] == 12 * share
    assert everything.offloaded["gradients"] == 2 * GB8
    assert everything.on_host == sum(everything.offloaded.values())
    optimizer = ["engine.offload_optimizer=true", "engine.zero=2"]
    assert footprint(planned(*optimizer), 4).offloaded == {"optimizer": 8 * share + GB8 + GB4, "gradients": GB8}
    assert footprint(planned(*optimizer, "data.batch=2"), 4).offloaded["gradients"] == GB8 + 2 * share


def test_offloaded_inputs_stay_in_a_cpus_only_memory() -> None:
    there, offloaded = (footprint(planned(f"engine.offload_activations={flag}"), 4, gpu=False) for flag in ("false", "true"))
    assert offloaded == there and not offloaded.offloaded


def test_a_host_has_to_hold_what_its_ranks_offload(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["experiment=llama_8b_1m", "hardware=h200", "hardware.gpus=4"]
    assert check.main(plan) == 0
    unknown = capsys.readouterr().out
    assert "all, by 4 on a host        256.00  what a host has is not known: give hardware.host_gib" in unknown
    assert check.main([*plan, "hardware.host_gib=512"]) == 0
    assert "256.00  of 512 GiB (8% is left to all else): it fits" in capsys.readouterr().out
    assert check.main([*plan, "hardware.host_gib=256"]) == 1
    too_small = capsys.readouterr().out
    assert "256.00  of 256 GiB (8% is left to all else): IT DOES NOT FIT" in too_small and "  16 GPUs in one ring" in too_small
    most = next(line for line in too_small.splitlines() if "the longest sequence" in line)
    assert "524,288 tokens" in most and most not in unknown
    assert check.main([*plan, "hardware.host_gib=128", "data.length=256k", "engine.offload_optimizer=true"]) == 1
    assert "engine.offload_optimizer=false: " in capsys.readouterr().out
    assert check.main([*plan, "hardware.gpus=16", "hardware.host_gib=256"]) == 0
    assert "all, by 8 on a host        128.00" in capsys.readouterr().out
    assert check.main(BIG) == 0 and "offloaded" not in capsys.readouterr().out


def test_a_run_that_offloads_too_much_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned("engine.offload_activations=true")
    monkeypatch.setattr(footprint_module, "memory_of_machine", lambda: 128 * GIB)
    assert too_much(config, 4, 140 * GIB) == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert "is planned to offload 16.0 GiB and has 16.0 of this machine's memory, so" in too_much(config, 4, 140 * GIB)
    both = too_much(config, 4, GIB)
    assert "is planned to need" in both and ", and to offload 16.0 GiB" in both


def test_a_plan_says_what_travel_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    def assumed(*overrides: str) -> list[str]:
        check.main([*BIG, *overrides])
        lines = capsys.readouterr().out.splitlines()
        words = ("hidden by attention", "ulysses ranks", "the host's work", "as if")
        return [line for line in lines if any(word in line for word in words)]

    ring, heads, offloaded, hosts = assumed("hardware.gpus=16", "parallel.ulysses=2", "engine.offload_activations=true")
    assert "K/V and their gradients" in ring and "exchange of heads" in heads and "of what is offloaded" in offloaded
    assert "as if all 16 GPUs were of one host, though it has 8" in hosts
    assert assumed("hardware.gpus=8") == [ring]
    assert assumed("hardware.gpus=1", "hardware.memory_gib=1000") == []
