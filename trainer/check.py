"""Plan a run without a GPU: does it fit into memory, how long is a step, and what is the longest sequence?

    ringspan check experiment=llama_8b_1m hardware=h200 hardware.gpus=4

The config is composed and validated as for a run, and the memory plan is the one that the run would choose (engine.memory).
Memory is counted term by term (planning/memory.py), FLOPs as in planning/flops.py. Offloaded tensors must fit into the host's
memory, if its size is known: this machine's, or hardware.host_gib. Attention's speed is that of the nearest shape that
`ringspan bench kernels` measured. The speed of another device is scaled by the ratio of the peaks, and the report says so.
Matmuls have measured speeds by shape, or run at a share of the peak on devices that were not measured. Without `hardware=` the
plan is for this machine, and its speeds are measured first.
"""

import math
import sys

from ringspan.trainer.config import compose, validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.planning.flops import parameters, training_flops
from ringspan.trainer.planning.machines import MACHINES, Machine, default_num_ranks, resolve_machine
from ringspan.trainer.planning.matmul_speeds import speeds_of
from ringspan.trainer.planning.memory import GIB, Footprint
from ringspan.trainer.planning.plans import PlannedStep, Planner, fewest_gpus, longest_sequence
from ringspan.trainer.planning.remedies import MAX_RANKS, remedies
from ringspan.trainer.planning.step_time import attention_speed, step_time

PROGRAM = "ringspan check"
NAME_WIDTH = 29  # of the longest name of a term


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Returns 0 if it fits, 1 if it does not; an invalid config exits with code 2."""
    argv = sys.argv[1:] if argv is None else argv
    gpus = next((text.partition("=")[2] for text in argv if text.startswith("hardware.gpus=")), "")
    ranks = int(gpus) if gpus.isdecimal() and int(gpus) else None
    composed = compose.main(PROGRAM, __doc__, argv, world_size=ranks or _default_ranks(argv), planning=True)
    try:
        text, enough = report(composed.config)
    except ValueError as error:
        compose.fail(PROGRAM, error)
    print(text)
    return 0 if enough else 1


def _default_ranks(argv: list[str]) -> int:
    name = next((text.partition("=")[2] for text in argv if text.startswith(("hardware=", "hardware.name="))), "auto")
    if name in MACHINES:
        return 1
    return default_num_ranks(name == "cpu")


def report(config: Config) -> tuple[str, bool]:
    """Return the plan as text, and whether it fits.

    Raises:
        ValueError: the config is invalid for this number of ranks.
    """
    target, world = resolve_machine(config)
    config = tokenizer.resolve_config(config)
    if problems := validate.validate_config(config, world, planning=True):
        raise ValueError("\n".join(problems))
    planner = Planner(config, world, target)
    chosen = planner.choose()
    lines = [*_description(config, world, target), "", *_plans(planner, chosen), ""]
    lines += _memory(config, world, target, chosen.need)
    if not chosen.fits:
        limit = f"up to {MAX_RANKS} GPUs" if target.gpu else "this machine"
        smaller = "choose a smaller model" if target.gpu else "choose a smaller model or a shorter sequence"
        lines += ["", planner.misfit(chosen)]
        lines += ["", "changes that fit", *(remedies(config, world, target) or [f"  none on {limit}: {smaller}"])]
    lines += ["", *_time(config, world, target, chosen), *_assumptions(config, world, target, bool(chosen.need.offloaded))]
    return "\n".join(lines), chosen.fits


def _plans(planner: Planner, chosen: PlannedStep) -> list[str]:
    """The table of the chosen plan and the next two."""
    others = [step for step in planner.fastest(3) if step.plan != chosen.plan][:2]
    width = max(len(str(step.plan)) for step in [chosen, *others])
    lines = [f"{'memory plan':{width + 8}}  GiB per rank  of the host  seconds per step"]
    for step in [chosen, *others]:
        name = f"{'chosen' if step is chosen else 'next':6}  {step.plan}"
        host = f"{step.need.on_host / GIB:11.2f}" if step.need.on_host else f"{'':11}"
        note = "" if step.fits else "  does not fit"
        lines.append(f"  {name:{width + 8}}{step.need.peak / GIB:12.2f}  {host}  {step.seconds:16.4g}{note}")
    return lines


def _description(config: Config, world: int, target: Machine) -> list[str]:
    data, ring, ulysses = validate.mesh_of(config, world)
    counts = parameters(config.model)
    terms = {"embedding": counts.embedding, "attention": counts.attention, "MLP": counts.mlp, "norms": counts.norms}
    terms |= {"head": counts.head} if counts.head else {}
    return [
        f"{config.model.name}: {counts.total:,} weights ({', '.join(f'{k} {v:,}' for k, v in terms.items())})",
        f"{config.data.batch} × {config.data.length:,} tokens per step on {world} × {target.name}: "
        f"data {data} × ring {ring} × ulysses {ulysses}, ZeRO {config.engine.zero}",
    ]


def _memory(config: Config, world: int, target: Machine, need: Footprint) -> list[str]:
    lines = ["memory per rank, GiB"]
    at_peak = need.moments[need.peak_moment]
    rows = [(name, size, "" if name in at_peak else "not at the peak") for name, size in need.terms.items()]
    lines += [f"  {name:{NAME_WIDTH}} {size / GIB:8.2f}  {note}".rstrip() for name, size, note in rows]
    verdict = "it fits" if target.fits_device(need) else "IT DOES NOT FIT"
    memory = f"of {target.usable / GIB:.1f} GiB for tensors ({target.memory / GIB:.1f} in all)"
    lines += [f"  {'peak':{NAME_WIDTH}} {need.peak / GIB:8.2f}  {memory}, at {need.peak_moment}: {verdict}"]
    lines += _host_memory(need, world, target)
    longest = longest_sequence(config, world, target)
    unknown = " (with as much host memory as it needs)" if target.gpu and target.host == math.inf else ""
    lines.append(
        f"  longest sequence that fits: {longest:,} tokens{unknown}" if longest else "  no sequence fits, not even a short one"
    )
    if target.gpu:
        fewest = fewest_gpus(config, target, MAX_RANKS)
        count = f"{fewest:,} × {target.name} in one ring" if fewest else f"more than {MAX_RANKS:,} × {target.name}"
        lines.append(f"  fewest GPUs for {config.data.length:,} tokens: {count}")
    return lines


def _host_memory(need: Footprint, world: int, target: Machine) -> list[str]:
    """Lines about offloaded tensors, if there are any."""
    if not need.offloaded:
        return []
    ranks = min(world, target.gpus)
    if target.host == math.inf:
        verdict = "the host's memory is unknown: set hardware.host_gib"
    else:
        host = target.usable_host(world)
        verdict = f"of {ranks * host / GIB:.0f} GiB for tensors ({target.host / GIB:.0f} in all): "
        verdict += "it fits" if need.on_host <= host else "IT DOES NOT FIT"
    lines = ["", "offloaded to the host's memory per rank, GiB"]
    lines += [f"  {name:{NAME_WIDTH}} {size / GIB:8.2f}" for name, size in need.offloaded.items()]
    return [*lines, f"  {f'all, {ranks} ranks per host':{NAME_WIDTH}} {ranks * need.on_host / GIB:8.2f}  {verdict}"]


def _time(config: Config, world: int, target: Machine, chosen: PlannedStep) -> list[str]:
    times = step_time(config, world, target, chosen.plan)
    total = sum(times.values())
    forward, backward, source = attention_speed(config, target)
    measured = speeds_of(target)
    matmuls = f"by shape, as measured on {measured.name}" if measured else f"at {target.matmuls / 1e12:.4g}"
    lines = ["time of a step, seconds"]
    lines += [f"  {name:36} {seconds:9.3f}" for name, seconds in times.items()]
    tokens = config.data.batch * config.data.length
    lengths = [config.data.length] * config.data.batch
    rates = {c: training_flops(config.model, lengths, c) / total / world for c in ("3x", "3.5x")}
    mfu = {c: f" ({rate / target.peak:.1%} MFU)" if target.peak else "" for c, rate in rates.items()}
    return [
        *lines,
        f"  {'total':36} {total:9.3f}  {tokens / total:,.0f} tokens/s; {rates['3.5x'] / 1e12:.4g} TFLOP/s per rank, attention "
        f"counted 3.5×{mfu['3.5x']}, or {rates['3x'] / 1e12:.4g} counted 3×{mfu['3x']}",
        f"  {config.steps:,} steps take {_duration(total * config.steps)}; documents shorter than the sequence take less",
        f"  (attention at {forward / 1e12:.4g} forward, {backward / 1e12:.4g} backward TFLOP/s: {source}; matmuls {matmuls})",
    ]


def _assumptions(config: Config, world: int, target: Machine, offloads: bool) -> list[str]:
    """Lines about the transfers that a step's time leaves out."""
    _, ring, ulysses = validate.mesh_of(config, world)
    lines = []
    if ring > 1:
        lines.append("  (the ring's transfers of K/V and their gradients are assumed to overlap with attention completely)")
    if ulysses > 1:
        lines.append("  (the exchange of heads between ulysses ranks is not counted)")
    if offloads:
        lines.append("  (transfers of offloaded weights and optimizer state, and the host's optimizer, are not counted)")
    if target.gpu and world > target.gpus:
        lines.append(
            f"  (as if all {world} GPUs were on one host, which has {target.gpus}; transfers between hosts are slower)"
        )
    return lines


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


if __name__ == "__main__":
    raise SystemExit(main())
