"""Will it fit, and how long is a step? Answered without a GPU, before one is paid for.

    ringspan check experiment=llama_8b_1m hardware=h200 hardware.gpus=4

The config is composed and checked as a run would do it. Memory is counted term by term (footprint.py), operations as cost.py
counts them. What is offloaded has to fit into the host's memory, where that is known: this machine's, or hardware.host_gib.
Attention's speed is the one that `ringspan bench kernels` measured on such a device (docs/results), or scaled from another by
their peaks, which is then said; products are taken at a share of the peak. Without `hardware=` the plan is for this machine,
whose speeds are measured on the spot.
"""

import math
import sys
from dataclasses import replace
from typing import Any

from ringspan.trainer.config import compose, validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.planning.flops import parameters, training_flops
from ringspan.trainer.planning.machines import MACHINES, Machine, machine, ranks_here
from ringspan.trainer.planning.memory import GIB, RESERVE, Footprint, fits, footprint, longest
from ringspan.trainer.planning.step_time import attention_speed, step_time

PROGRAM = "ringspan check"


def remedies(config: Config, world: int, target: Machine) -> list[str]:
    """What would make it fit, each change with the peak that it leads to; the gentlest first."""
    engine, data = config.engine, config.data
    changes: list[dict[str, Any]] = [{"engine.offload_activations": False}, {"engine.offload_optimizer": False}]
    changes += [{"engine.activations": "attention"}, {"data.micro_batch": 1}, {"engine.zero": 2}]
    changes += [{"engine.zero": 3}, {"engine.activations": "full"}, {"engine.zero": 3, "engine.activations": "full"}]
    changes += [{"engine.zero": 3, "engine.activations": "attention", "engine.offload_activations": True}]
    changes += [{"engine.zero": 3, "engine.activations": "full", "engine.offload_activations": True}]
    last = changes[-1]
    changes += [{**last, "engine.offload_optimizer": True}]
    lines = []
    if not target.gpu:  # nothing can be moved out of a CPU's memory
        changes = [change for change in changes if not any("offload" in key for key in change)]
    for change in changes:
        given = {
            key: value
            for key, value in change.items()
            if getattr(engine if key[0] == "e" else data, key.split(".")[1]) != value
        }
        if not given or given.get("engine.zero", 3) < engine.zero:
            continue
        of = {kind: {k.split(".")[1]: v for k, v in given.items() if k.startswith(kind)} for kind in ("engine", "data")}
        tried = replace(config, engine=replace(engine, **of["engine"]), data=replace(data, **of["data"]))
        found = footprint(tried, world, target.gpu)
        if target.fits(found, world):
            said = " ".join(f"{key}={str(value).lower()}" for key, value in given.items())
            lines.append(f"  {said}: {_size(found)}")
    lines = list(dict.fromkeys(lines))  # what is there already makes some of them alike
    ranks = world
    while ranks < 1024 and not lines and target.gpu:
        ranks *= 2
        spread = replace(config, parallel=replace(config.parallel, ring=0, data=1))
        found = footprint(spread, ranks, target.gpu)
        if target.fits(found, ranks):
            lines.append(f"  {ranks} GPUs in one ring: {_size(found)}")
    return lines


def _size(found: Footprint) -> str:
    return f"{found.peak / GIB:.1f} GiB" + (f", and {found.on_host / GIB:.1f} of the host's" if found.offloaded else "")


def _host_lines(found: Footprint, world: int, target: Machine) -> list[str]:
    """What is offloaded, if anything is."""
    if not found.offloaded:
        return []
    ranks = min(world, target.gpus)
    if target.host == math.inf:
        verdict = "what a host has is not known: give hardware.host_gib"
    else:
        enough = fits(found.on_host, target.host_of_a_rank(world))
        verdict = (
            f"of {target.host / GIB:.0f} GiB ({RESERVE:.0%} is left to all else): {'it fits' if enough else 'IT DOES NOT FIT'}"
        )
    lines = ["", "offloaded by a rank to its host's memory, GiB"]
    lines += [f"  {name:24} {size / GIB:8.2f}" for name, size in found.offloaded.items()]
    return [*lines, f"  {f'all, by {ranks} on a host':24} {ranks * found.on_host / GIB:8.2f}  {verdict}"]


def report(config: Config) -> tuple[str, bool]:
    """The plan as text, and whether it fits."""
    target, world = machine(config)
    config = tokenizer.resolve_config(config)
    if problems := validate.check(config, world, planning=True):
        raise ValueError("\n".join(problems))
    data, ring, ulysses = validate.mesh_of(config, world)
    counts, found = parameters(config.model), footprint(config, world, target.gpu)
    terms = {"embedding": counts.embedding, "attention": counts.attention, "MLP": counts.mlp, "norms": counts.norms}
    terms |= {"head": counts.head} if counts.head else {}
    lines = [
        f"{config.model.name}: {counts.total:,} weights ({', '.join(f'{k} {v:,}' for k, v in terms.items())})",
        f"{config.data.batch} × {config.data.length:,} tokens a step on {world} × {target.name}: "
        f"data {data} × ring {ring} × ulysses {ulysses}, ZeRO {config.engine.zero}, activations {config.engine.activations}",
        "",
        "memory of a rank, GiB",
    ]
    there = found.moments[found.highest]
    rows = [(name, size, "" if name in there else "not at the peak") for name, size in found.terms.items()]
    lines += [f"  {name:24} {size / GIB:8.2f}  {note}".rstrip() for name, size, note in rows]
    verdict = "it fits" if fits(found.peak, target.memory) else "IT DOES NOT FIT"
    room = f"of {target.memory / GIB:.0f} GiB ({RESERVE:.0%} is left to the driver, NCCL and gaps), at {found.highest}"
    lines += [f"  {'peak':24} {found.peak / GIB:8.2f}  {room}: {verdict}", *_host_lines(found, world, target)]
    most = longest(config, world, target.memory, target.gpu, target.host_of_a_rank(world))
    lines += [f"  the longest sequence that fits: {most:,} tokens" if most else "  no sequence fits, however short"]
    enough = target.fits(found, world)
    if not enough:
        smaller = "take a smaller model" if target.gpu else "take a smaller model or a shorter sequence"
        lines += [
            "",
            "what would fit",
            *(
                remedies(config, world, target)
                or [f"  nothing on {'up to 1024 GPUs' if target.gpu else 'this machine'}: {smaller}"]
            ),
        ]
    times = step_time(config, world, target)
    total = sum(times.values())
    speed = attention_speed(config, target)
    lines += ["", "time of a step, seconds"]
    lines += [f"  {name:36} {seconds:9.3f}" for name, seconds in times.items()]
    tokens = config.data.batch * config.data.length
    lengths = [config.data.length] * config.data.batch
    rates = {c: training_flops(config.model, lengths, c) / total / world for c in ("3x", "3.5x")}
    mfu = {c: f" ({rate / target.peak:.1%} MFU)" if target.peak else "" for c, rate in rates.items()}
    lines += [
        f"  {'total':36} {total:9.3f}  {tokens / total:,.0f} tokens/s; {rates['3.5x'] / 1e12:.4g} TFLOP/s a rank counting "
        f"attention 3.5×{mfu['3.5x']}, {rates['3x'] / 1e12:.4g} counting it 3×{mfu['3x']}",
        f"  {config.steps:,} steps take {_duration(total * config.steps)}; documents shorter than the sequence take less",
        f"  (attention at {speed[0] / 1e12:.4g} forward, {speed[1] / 1e12:.4g} backward TFLOP/s: {speed[2]}; "
        f"products at {target.products / 1e12:.4g})",
        *_assumed(ring, ulysses, world, target, bool(found.offloaded)),
    ]
    return "\n".join(lines), enough


def _assumed(ring: int, ulysses: int, world: int, target: Machine, offloads: bool) -> list[str]:
    """What of the travel a step's time leaves out."""
    lines = []
    if ring > 1:
        lines.append("  (what travels round the ring, K/V and their gradients, is taken to be hidden by attention)")
    if ulysses > 1:
        lines.append("  (the exchange of heads between ulysses ranks is not counted)")
    if offloads:
        lines.append("  (the travel of what is offloaded, and the host's work on it, are not counted)")
    if target.gpu and world > target.gpus:
        lines.append(
            f"  (as if all {world} GPUs were of one host, though it has {target.gpus}; between hosts all travel is slower)"
        )
    return lines


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def main(argv: list[str] | None = None) -> int:
    """0: it fits; 1: it does not; 2: there is no such config."""
    argv = sys.argv[1:] if argv is None else argv
    gpus = next((text.partition("=")[2] for text in argv if text.startswith("hardware.gpus=")), "")
    ranks = int(gpus) if gpus.isdecimal() and int(gpus) else None
    composed = compose.main(PROGRAM, __doc__, argv, world_size=ranks or _ranks_here(argv), planning=True)
    try:
        text, enough = report(composed.config)
    except ValueError as error:
        compose.fail(PROGRAM, error)
    print(text)
    return 0 if enough else 1


def _ranks_here(argv: list[str]) -> int:
    named = next((text.partition("=")[2] for text in argv if text.startswith(("hardware=", "hardware.name="))), "auto")
    if named in MACHINES:
        return 1
    return ranks_here(named == "cpu")


if __name__ == "__main__":
    raise SystemExit(main())
