"""Choose the memory plan of a run: of all plans that fit the device and the host, the fastest. Imports no torch.

Plans are tried from the fastest on. A plan that does not fit the device is tried with as few tensors on the host as let it fit,
(out, lse) first. Whether any plan fits is asked of the smallest ones alone: one KV head and the fewest rows at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import mesh_of
from ringspan.trainer.memory.plan import NONE, MemoryPlan, parse
from ringspan.trainer.planning.machines import Machine
from ringspan.trainer.planning.memory import GIB, Footprint, footprint
from ringspan.trainer.planning.step_time import StepTimer

SEGMENTS = (1, 2, 4, 8)
ROWS = (65536, 32768, 16384, 8192, 4096)  # below 8192 matmuls lose speed
SMALLER = 0.9  # share of a plan's memory that the next plan after an out-of-memory error needs at most
LONGEST = 2**25  # tokens
REFUSED_FROM = 1.5  # times the memory at hand: the planned memory is within a few per cent of the measured one


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


class Planner:
    """The plans of one config on one machine.

    Args:
        config: a valid config whose model is resolved.
        world: number of ranks.
        target: the machine.
    """

    def __init__(self, config: Config, world: int, target: Machine) -> None:
        self.config, self.world, self.target = config, world, target
        self._timer: StepTimer | None = None

    def choose(self) -> PlannedStep:
        """Return the plan that `engine.memory` asks for.

        `fits` is False if it does not fit; for `auto` and `least` the plan of least memory is returned then.
        """
        text = self.config.engine.memory
        if text == "auto":
            return next(iter(self.fastest(1)), None) or self.least()
        return self.least() if text == "least" else self.step(parse(text, self.config.model))

    def fastest(self, count: int = 1, below: float = math.inf) -> list[PlannedStep]:
        """Return the fastest plans that fit, each with other tensors kept than the previous ones.

        Args:
            count: at most as many.
            below: bytes that the peak must not exceed.
        """
        timed = [(self.seconds(plan), number, plan) for number, plan in enumerate(self._candidates())]
        found: dict[tuple[int, int], PlannedStep] = {}
        for seconds, _, plan in sorted(timed, key=lambda entry: (round(entry[0], 9), entry[1])):  # simpler plans first
            best = sorted(step.seconds for step in found.values())
            if len(best) >= count and seconds > best[count - 1]:
                break
            if (plan.segment, plan.outs) in found:
                continue
            if (step := self._fitting(plan)) is not None and step.need.peak <= below:
                found[plan.segment, plan.outs] = step
        return sorted(found.values(), key=lambda step: step.seconds)[:count]

    def least(self) -> PlannedStep:
        """Return the plan of least device memory, of those that fit if there is one."""
        plans = [plan for base in self._smallest() for plan in (base, self._all_on_host(base))]
        plans += [replace(plan, late=True) for plan in plans if plan.inputs_on_host + plan.outs_on_host]
        steps = [self.step(plan) for plan in plans]
        return min(steps, key=lambda step: (not step.fits, step.need.peak, step.need.on_host))

    def any_fits(self) -> bool:
        """Return whether the plan fits that `engine.memory` gives, or any for `auto` and `least`."""
        if self.config.engine.memory in ("auto", "least"):
            return any(self._fitting(plan) is not None for plan in self._smallest())
        return self.target.fits(self.need(parse(self.config.engine.memory, self.config.model)), self.world)

    def next_smaller(self, plan: MemoryPlan) -> PlannedStep | None:
        """Return the fastest plan that needs clearly less device memory than this one."""
        return next(iter(self.fastest(1, below=SMALLER * self.need(plan).peak)), None)

    def misfit(self, step: PlannedStep) -> str:
        """Return what a plan that does not fit lacks, and the nearest change that fits; "" for one that fits."""
        if step.fits:
            return ""
        device, host = self.target.usable, self.target.usable_host(self.world)
        missing = []
        if step.need.peak > device:
            gpu = "GPU" if self.target.gpu else "rank"
            missing.append(
                f"{(step.need.peak - device) / GIB:.1f} GiB on each {gpu} (it needs {step.need.peak / GIB:.1f} at "
                f"{step.need.peak_moment}, {device / GIB:.1f} of {self.target.memory / GIB:.1f} are available)"
            )
        if step.need.on_host > host:
            missing.append(
                f"{(step.need.on_host - host) / GIB:.1f} GiB of host memory per rank (it needs {step.need.on_host / GIB:.1f}, "
                f"{host / GIB:.1f} are available)"
            )
        nearest = next(iter(self.fastest(1)), None)
        if nearest is not None:
            hint = f"engine.memory={str(nearest.plan)!r} fits"
        elif longest := longest_sequence(self.config, self.world, self.target):
            hint = f"no plan fits; the longest sequence that does has {longest:,} tokens"
        else:
            hint = "no plan fits, not even for a short sequence"
        return f"engine.memory={str(step.plan)!r} lacks {' and '.join(missing)}; {hint}"

    def refusal(self, step: PlannedStep) -> str:
        """Return why a run does not start with a plan that needs far more than the memory at hand; "" if it may start."""
        need, limit = step.need, REFUSED_FROM * self.target.memory
        if need.peak <= limit or self.config.hardware.ignore_plan:
            return ""
        return (
            f"{self.misfit(step)}; a run that needs more than {REFUSED_FROM:g} × the memory at hand is not started; "
            "hardware.ignore_plan=true starts it"
        )

    def step(self, plan: MemoryPlan) -> PlannedStep:
        need = self.need(plan)
        return PlannedStep(plan, need, self.seconds(plan), self.target.fits(need, self.world))

    def need(self, plan: MemoryPlan) -> Footprint:
        return footprint(self.config, self.world, self.target.gpu, plan)

    def seconds(self, plan: MemoryPlan) -> float:
        self._timer = self._timer or StepTimer(self.config, self.world, self.target)
        return sum(self._timer(plan).values())

    def _chunks(self) -> list[tuple[int, int]]:
        """(KV heads per group, rows per chunk), the simplest first and the smallest last."""
        model = self.config.model
        _, ring, ulysses = mesh_of(self.config, self.world)
        rows = [rows for rows in ROWS if rows < self.config.data.length // (ring * ulysses)]
        group = model.heads // model.kv_heads
        heads = [n for n in range(model.kv_heads - 1, 0, -1) if model.kv_heads % n == 0 and n * group % ulysses == 0]
        return [(0, 0), *((h, r) for r in rows for h in (0, *heads))]

    def _candidates(self) -> Iterator[MemoryPlan]:
        """Plans from the simplest to the one of least memory, without host memory."""
        layers, chunks = self.config.model.layers, self._chunks()
        yield NONE
        for segment in dict.fromkeys(min(size, layers) for size in SEGMENTS):
            for outs in dict.fromkeys([layers, 3 * layers // 4, layers // 2, layers // 4, 0]):
                for heads, rows in chunks:
                    yield MemoryPlan(segment, outs, heads=heads, rows=rows)

    def _smallest(self) -> Iterator[MemoryPlan]:
        layers, chunks = self.config.model.layers, self._chunks()
        yield NONE
        for segment in dict.fromkeys(min(size, layers) for size in SEGMENTS):
            for outs in (0, layers):
                for heads, rows in dict.fromkeys([chunks[0], chunks[-1]]):
                    yield MemoryPlan(segment, outs, heads=heads, rows=rows)

    def _moved(self, plan: MemoryPlan, count: int) -> MemoryPlan:
        """The plan with `count` of its kept tensors on the host: (out, lse) first, then inputs."""
        return replace(plan, outs_on_host=min(count, plan.outs), inputs_on_host=max(0, count - plan.outs))

    def _all_on_host(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan with as many of its tensors on the host as fit there."""
        if not self._can_move(plan):
            return plan
        host = self.target.usable_host(self.world)
        low, high = 0, plan.outs + len(plan.segments(self.config.model.layers))
        while low < high:
            middle = (low + high + 1) // 2
            enough = self.need(self._moved(plan, middle)).on_host <= host
            low, high = (middle, high) if enough else (low, middle - 1)
        return self._moved(plan, low)

    def _can_move(self, plan: MemoryPlan) -> bool:
        return self.target.gpu and not plan.keeps_everything

    def _fitting(self, plan: MemoryPlan) -> PlannedStep | None:
        """The plan with as little on the host as lets it fit; None if it does not fit."""
        need = self.need(plan)
        if self.target.fits(need, self.world):
            return PlannedStep(plan, need, self.seconds(plan), True)
        if not self._can_move(plan):
            return None
        high = plan.outs + len(plan.segments(self.config.model.layers))
        if not self.target.fits_device(self.need(self._moved(plan, high))):
            plan = replace(plan, late=True)
            if not self.target.fits_device(self.need(self._moved(plan, high))):
                return None
        low = int(plan.late)  # more on the host means less on the device, so the first that fits the device is the best
        while low < high:
            middle = (low + high) // 2
            fits = self.target.fits_device(self.need(self._moved(plan, middle)))
            low, high = (low, middle) if fits else (middle + 1, high)
        step = self.step(self._moved(plan, low))
        return step if step.fits else None


def longest_sequence(config: Config, world: int, target: Machine) -> int:
    """Return the longest sequence in multiples of 1024 tokens whose step fits under some plan; 0 if none does.

    Args:
        config: the config; its data.length is replaced.
        world: number of ranks.
        target: the machine.
    """

    def length_fits(length: int) -> bool:
        positions = length if config.model.positions == "learned" else 0
        model = replace(config.model, max_positions=positions)
        changed = replace(config, data=replace(config.data, length=length), model=model)
        return Planner(changed, world, target).any_fits()

    if not length_fits(1024):
        return 0
    low, high = 1, 2
    while high < LONGEST // 1024 and length_fits(high * 1024):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if length_fits(middle * 1024) else (low, middle)
    return low * 1024


def fewest_gpus(config: Config, target: Machine, limit: int = 1024) -> int:
    """Return the fewest GPUs, a power of two in one ring, on which a step of this length fits; 0 for more than `limit`."""
    spread = replace(config, parallel=replace(config.parallel, ring=0, data=1))
    for power in range(int(math.log2(limit)) + 1):
        if 2**power % config.parallel.ulysses == 0 and Planner(spread, 2**power, target).any_fits():
            return 2**power
    return 0
