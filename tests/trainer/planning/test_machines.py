"""Machines: known ones from datasheets, this one measured, and changes by the options `hardware`."""

import math
import os

import pytest

from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.planning.host_memory import host_memory, num_cores
from ringspan.trainer.planning.machines import MACHINES, MATMUL_EFFICIENCY, resolve_machine
from ringspan.trainer.planning.memory import GIB
from tests.trainer.planning.configs import planned


def test_known_machine_with_the_options_of_hardware() -> None:
    target, ranks = resolve_machine(planned())
    assert (target.name, target.memory, target.host, ranks) == ("NVIDIA H200", 139.8 * GIB, math.inf, 4)
    assert target.matmuls == MATMUL_EFFICIENCY * target.peak and target.attention is None
    target, ranks = resolve_machine(planned("hardware.memory_gib=60", "hardware.host_gib=512"))
    assert (target.memory, target.host) == (60 * GIB, 512 * GIB)
    assert MACHINES["h200"].memory == 139.8 * GIB, "the table is unchanged"


@pytest.mark.parametrize(("world", "ranks"), [(1, 1), (4, 4), (8, 8), (16, 8)])
def test_host_memory_is_divided_by_the_ranks_of_a_host(world: int, ranks: int) -> None:
    target, _ = resolve_machine(planned("hardware.host_gib=512"))
    assert target.host_memory_per_rank(world) == 512 * GIB / ranks


def test_cpu_is_measured() -> None:
    config: Config = compose.load(["hardware=cpu", "data.length=512"], world_size=2, planning=True).config
    target, ranks = resolve_machine(config)
    assert (target.name, target.gpu, ranks) == ("CPU rank", False, 2) and target.memory == host_memory() / 2
    assert target.matmuls > 0 and target.attention is not None and min(target.attention) > 0


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    assert num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # not on Linux
    assert num_cores() == 64
