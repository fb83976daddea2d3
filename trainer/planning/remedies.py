"""Changes of a config that make its memory fit. Imports no torch."""

from dataclasses import replace
from typing import Any

from ringspan.trainer.config.schema import Config
from ringspan.trainer.planning.machines import Machine
from ringspan.trainer.planning.memory import GIB, Footprint
from ringspan.trainer.planning.plans import Planner

MAX_RANKS = 1024


def remedies(config: Config, world: int, target: Machine) -> list[str]:
    """Return a line per change that fits, with its peak memory; the least intrusive change first."""
    lines = []
    for changes in _candidates(target.gpu):
        changes = {key: value for key, value in changes.items() if _current(config, key) != value}
        if not changes or changes.get("engine.zero", 3) < config.engine.zero:
            continue
        step = Planner(_apply(config, changes), world, target).choose()
        if step.fits:
            text = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
            lines.append(f"  {text}: {_size(step.need)}, plan {step.plan}")
    lines = list(dict.fromkeys(lines))  # candidates coincide where the config has some of their values
    ranks = world
    while ranks < MAX_RANKS and not lines and target.gpu:
        ranks *= 2
        one_ring = replace(config, parallel=replace(config.parallel, ring=0, data=1))
        step = Planner(one_ring, ranks, target).choose()
        if step.fits:
            lines.append(f"  {ranks} GPUs in one ring: {_size(step.need)}, plan {step.plan}")
    return lines


def _candidates(gpu: bool) -> list[dict[str, Any]]:
    candidates: list[dict[str, Any]] = [{"engine.memory": "auto"}, {"engine.offload_optimizer": False}]
    candidates += [{"engine.memory": "auto"} | changes for changes in ({"data.micro_batch": 1}, {"engine.zero": 2})]
    candidates += [{"engine.memory": "auto", "engine.zero": 3}]
    strongest = {"engine.memory": "auto", "engine.offload_optimizer": True}
    candidates += [{**strongest, "engine.zero": zero} for zero in (1, 2, 3)]
    if gpu:
        return candidates
    # A CPU rank has no other memory to offload to.
    return [changes for changes in candidates if not any("offload" in key for key in changes)]


def _current(config: Config, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _apply(config: Config, changes: dict[str, Any]) -> Config:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, name = key.split(".")
        groups.setdefault(group, {})[name] = value
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in groups.items()})


def _size(need: Footprint) -> str:
    return f"{need.peak / GIB:.1f} GiB" + (f", and {need.on_host / GIB:.1f} GiB of host memory" if need.offloaded else "")
