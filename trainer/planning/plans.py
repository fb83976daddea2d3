"""Choose the memory plan of a run: of all plans that fit the device and the host, the fastest. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import mesh_of
from ringspan.trainer.memory.plan import NONE, MemoryPlan, parse
from ringspan.trainer.planning.machines import Machine
from ringspan.trainer.planning.memory import GIB, Footprint, footprint
from ringspan.trainer.planning.step_time import step_time

SEGMENTS = (1, 2, 4, 8)
ROWS = (65536, 32768, 16384, 8192, 4096)  # below 8192 matmuls lose speed


@dataclass(frozen=True)
class PlannedStep:
    """A plan with its memory and time."""

    plan: MemoryPlan
    need: Footprint
    seconds: float
    fits: bool

    def __str__(self) -> str:
        host = f", {self.need.on_host / GIB:.1f} GiB of host memory" if self.need.on_host else ""
        return f"{self.plan}: {self.need.peak / GIB:.1f} GiB{host}, {self.seconds:.3g} s per step"


def choose_plan(config: Config, world: int, target: Machine) -> PlannedStep:
    """Return the plan that `engine.memory` asks for.

    Args:
        config: a valid config whose model is resolved.
        world: number of ranks.
        target: the machine.

    Returns:
        The step; `fits` is False if it does not fit. With `auto` and `least` the plan of least memory is returned then.
    """
    text = config.engine.memory
    if text not in ("auto", "least"):
        return planned_step(config, world, target, parse(text, config.model))
    found = ranked_plans(config, world, target)
    if text == "auto" and found[0].fits:
        return found[0]
    fitting = [step for step in found if step.fits]
    return min(fitting or found, key=lambda step: (step.need.peak, step.need.on_host))


def ranked_plans(config: Config, world: int, target: Machine) -> list[PlannedStep]:
    """All candidates: those that fit first, then the fastest, then the one of fewest chunks and least memory."""
    steps = [planned_step(config, world, target, plan) for plan in candidates(config, world, target)]
    order = {id(step): number for number, step in enumerate(steps)}  # simpler plans come first
    return sorted(steps, key=lambda step: (not step.fits, round(step.seconds, 9), order[id(step)]))


def planned_step(config: Config, world: int, target: Machine, plan: MemoryPlan) -> PlannedStep:
    need = footprint(config, world, target.gpu, plan)
    return PlannedStep(plan, need, sum(step_time(config, world, target, plan).values()), target.fits(need, world))


def candidates(config: Config, world: int, target: Machine) -> Iterator[MemoryPlan]:
    """Plans from the simplest to the one of least memory."""
    model, layers = config.model, config.model.layers
    _, ring, ulysses = mesh_of(config, world)
    rows_of_a_rank = -(-config.data.length // (ring * ulysses))
    yield NONE
    rows = [0, *(rows for rows in ROWS if rows < rows_of_a_rank)]
    group = model.heads // model.kv_heads
    heads = [0, *(n for n in range(model.kv_heads - 1, 0, -1) if model.kv_heads % n == 0 and n * group % ulysses == 0)]
    chunks = [(0, 0), *((h, r) for r in rows[1:] for h in heads)]
    for segment in dict.fromkeys(min(size, layers) for size in SEGMENTS):
        for outs in dict.fromkeys([layers, 3 * layers // 4, layers // 2, layers // 4, 0]):
            for h, r in chunks:
                plan = MemoryPlan(segment, outs, heads=h, rows=r)
                yield plan
                if target.gpu:
                    yield from offloaded(plan, config, world, target)


def offloaded(plan: MemoryPlan, config: Config, world: int, target: Machine) -> Iterator[MemoryPlan]:
    """The plan with as little on the host as lets it fit: (out, lse) first, then inputs."""
    layers = config.model.layers
    num_inputs = len(plan.segments(layers))

    def fits(outs: int, inputs: int) -> bool:
        moved = replace(plan, outs_on_host=outs, inputs_on_host=inputs)
        return target.fits(footprint(config, world, target.gpu, moved), world)

    steps = [(outs, 0) for outs in range(1, plan.outs + 1)] + [(plan.outs, inputs) for inputs in range(1, num_inputs + 1)]
    # more on the host means less on the device: the first that fits the device is the best
    low, high = 0, len(steps) - 1

    def device_fits(index: int) -> bool:
        outs, inputs = steps[index]
        need = footprint(config, world, target.gpu, replace(plan, outs_on_host=outs, inputs_on_host=inputs))
        return target.fits_device(need)

    if device_fits(high):
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if device_fits(middle) else (middle + 1, high)
        outs, inputs = steps[low]
        if fits(outs, inputs):
            yield replace(plan, outs_on_host=outs, inputs_on_host=inputs)


def longest_sequence(config: Config, world: int, target: Machine) -> int:
    """Return the longest sequence in multiples of 1024 tokens whose step fits; 0 if none does."""

    def length_fits(length: int) -> bool:
        positions = length if config.model.positions == "learned" else 0
        model = replace(config.model, max_positions=positions)
        changed = replace(config, data=replace(config.data, length=length), model=model)
        if config.engine.memory in ("auto", "least"):
            changed = replace(changed, engine=replace(config.engine, memory="least"))
        return choose_plan(changed, world, target).fits

    if not length_fits(1024):
        return 0
    low, high = 1, 2
    while high < 2**15 and length_fits(high * 1024):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if length_fits(middle * 1024) else (low, middle)
    return low * 1024


def fewest_gpus(config: Config, target: Machine, limit: int = 1024) -> int:
    """Return the fewest GPUs, a power of two in one ring, on which a step of this length fits; 0 for more than `limit`."""
    spread = replace(config, parallel=replace(config.parallel, ring=0, data=1))
    if config.engine.memory in ("auto", "least"):
        spread = replace(spread, engine=replace(config.engine, memory="least"))
    for power in range(int(math.log2(limit)) + 1):
        if choose_plan(spread, 2**power, target).fits:
            return 2**power
    return 0
