"""Will it fit, and how long is a step? Answered without a GPU, before one is paid for.

    python -m trainer.check experiment=llama_8b_1m hardware=h200 hardware.gpus=4

The config is composed and checked as a run would do it. Memory is counted term by term (footprint.py), operations as cost.py
counts them. What is offloaded has to fit into the host's memory, where that is known: this machine's, or hardware.host_gib.
Attention's speed is the one that `python -m kernels.bench` measured on such a device (docs/results), or scaled from another by
their peaks, which is then said; products are taken at a share of the peak. Without `hardware=` the plan is for this machine,
whose speeds are measured on the spot.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import compose, rules, tokenizer
from .config import Config
from .cost import PEAKS, attention_flops, head_dim, parameters, training_flops, visible_pairs
from .footprint import GIB, RESERVE, Footprint, fits, footprint, longest, memory_of_machine

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
PROGRAM = "python -m trainer.check"
PRODUCTS = 0.7  # of the peak: what large bf16 products reach
LINKS = 0.6  # of a link's nominal speed


@dataclass
class Machine:
    name: str
    memory: float  # bytes of one GPU, or of a CPU rank
    peak: float  # dense bf16 operations a second; 0: not known
    link: float  # bytes a second, each way, between GPUs of a host
    products: float = 0.0  # operations a second
    attention: tuple[float, float] | None = None  # the same, forward and backward, if measured here
    gpu: bool = True
    gpus: int = 8  # of one host
    host: float = math.inf  # bytes of a host's own memory, if known

    def fits(self, found: Footprint, world: int) -> bool:
        return fits(found.peak, self.memory) and fits(found.on_host, self.host_of_a_rank(world))

    def host_of_a_rank(self, world: int) -> float:
        return self.host / min(world, self.gpus)


# Datasheets: GiB, dense bf16 operations a second, GB/s each way between two GPUs' hosts of one node.
MACHINES = {
    "h200": Machine("NVIDIA H200", 139.8 * GIB, PEAKS["H200"], 450e9),
    "h100": Machine("NVIDIA H100", 79.1 * GIB, PEAKS["H100"], 450e9),
    "b200": Machine("NVIDIA B200", 178.3 * GIB, PEAKS["B200"], 900e9),
    "a100": Machine("NVIDIA A100", 79.1 * GIB, PEAKS["A100"], 300e9),
    "mi300x": Machine("AMD MI300X", 191.9 * GIB, PEAKS["MI300X"], 448e9),
}


def machine(config: Config) -> tuple[Machine, int]:
    """What is planned for, and how many of it."""
    name, given = config.hardware.name, config.hardware
    if name in MACHINES:
        found, num = MACHINES[name], given.gpus or 1
        found = replace(found, products=PRODUCTS * found.peak)
    else:
        found, here = _here(config)
        num = given.gpus or here
    host = given.host_gib * GIB if given.host_gib else found.host
    return replace(found, memory=given.memory_gib * GIB if given.memory_gib else found.memory, host=host), num


def _here(config: Config) -> tuple[Machine, int]:
    """This machine, its speeds measured now."""
    import torch

    num = ranks_here(config.hardware.name == "cpu")
    if not torch.cuda.is_available() or config.hardware.name == "cpu":
        return Machine("CPU rank", memory_of_machine() / num, 0.0, 2e9, *_measured(config, "cpu"), gpu=False), num
    properties = torch.cuda.get_device_properties(0)
    known = next((m for m in MACHINES.values() if m.name.split()[-1] in properties.name), None)
    peak, link = (known.peak, known.link) if known else (0.0, 50e9)
    here = dict(gpus=num, host=memory_of_machine())
    return Machine(properties.name, properties.total_memory, peak, link, *_measured(config, "cuda"), **here), num


def ranks_here(cpu: bool) -> int:
    """What `python -m launch` starts: one for each GPU, two without any."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() and not cpu else 2


def _measured(config: Config, device: str) -> tuple[float, tuple[float, float]]:
    """Operations a second of a product, and of attention forward and backward."""
    import torch

    import kernels

    gpu, model = device == "cuda", config.model
    size, length, dtype = (8192, 16384, torch.bfloat16) if gpu else (512, 1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = 2 * size**3 / _seconds(lambda: a @ b, gpu)
    width = head_dim(model)
    q, k, v = (
        torch.randn(1, length, heads, width, device=device, dtype=dtype, requires_grad=True)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )
    out = kernels.attention(q, k, v, mask=kernels.Mask(causal=True))
    dout = torch.randn_like(out)
    forward = _seconds(lambda: kernels.attention(q, k, v, mask=kernels.Mask(causal=True)), gpu)
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), gpu)
    once = 4 * model.heads * width * visible_pairs([length])
    return products, (once / forward, 2.5 * once / backward)


def _seconds(work: Callable[[], Any], gpu: bool) -> float:
    import torch

    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def attention_speed(config: Config, target: Machine) -> tuple[float, float, str]:
    """Operations a second of attention, forward and backward, and where they come from."""
    if target.attention:
        return *target.attention, "measured here"
    shapes: dict[str, Any] = {}
    best: tuple[float, float, float, str] | None = None
    width, windowed = head_dim(config.model), any(config.model.windows)
    results = [(path, json.loads(path.read_text())) for path in sorted(RESULTS.glob("attention-*.json"))]
    results.sort(key=lambda result: result[1]["date"], reverse=True)  # of equally near ones the newest is taken
    taken = {result["device"]: "triton" for _, result in results}  # by `auto`; where Hopper's kernels ran, these
    taken |= {result["device"]: "hopper" for _, result in results if any(row["kernel"] == "hopper" for row in result["rows"])}
    for path, result in results:
        shapes = {shape["name"]: shape for shape in result["shapes"]}
        for row in result["rows"]:
            if not row["ours"] or row["status"] != "ok" or "backward_tflops" not in row:
                continue
            shape = shapes[row["shape"]]
            known = next((m for m in MACHINES.values() if m.name == result["device"]), None)
            same = result["device"] in target.name or target.name in result["device"]
            if not shape["causal"] or (not same and (known is None or not target.peak)):
                continue
            far = abs(math.log2(shape["head_dim"] / width)) + abs(math.log2(shape["length"] / 32768)) / 4
            far += 2 * (bool(shape["window"]) != windowed) + bool(shape["documents"]) + 8 * (not same)
            far += 4 * (row["kernel"] != taken[result["device"]])
            factor = 1.0 if same else target.peak / known.peak  # type: ignore[union-attr]
            source = f"{row['shape']} in {path.name}" + ("" if same else f", scaled from {result['device']} by the peaks")
            if best is None or far < best[0]:
                best = far, row["forward_tflops"] * factor * 1e12, row["backward_tflops"] * factor * 1e12, source
    if best is None:
        return target.products / 2, target.products / 2, "no measurement: half the speed of products is assumed"
    return best[1], best[2], best[3]


def step_time(config: Config, world: int, target: Machine) -> dict[str, float]:
    """Seconds of a step by what they are spent on, for documents as long as the sequence; see `_assumed`."""
    model, engine, data = config.model, config.engine, config.data
    forward, backward, _ = attention_speed(config, target)
    lengths = [data.length] * data.batch
    counts = parameters(model)
    tokens = data.batch * data.length
    again = engine.activations != "none"
    layers = counts.products - model.vocabulary * model.dim
    products = (6 * counts.products + 2 * again * layers) * tokens / target.products / world
    once = attention_flops(model, lengths, 1.0)
    attention = (once * (1 + (engine.activations == "full")) / forward + 2.5 * once / backward) / world
    num = data.batch // (data.micro_batch * rules.mesh_of(config, world)[0])
    width = 2 if target.gpu else 4
    moved = (
        {0: 2 * 4, 1: 4 + width, 2: 4 * num + width, 3: (2 * width + 4) * num}[engine.zero] * counts.total * (world - 1) / world
    )
    # ZeRO 2 and 3 send gradients while the backward runs; ZeRO 3 fetches weights ahead. What stays visible is the rest.
    exposed = moved / (LINKS * target.link) * (1.0 if engine.zero < 2 else 0.3)
    return {"matrix products": products, "attention": attention, "weights and gradients on their way": exposed}


def resolve(config: Config) -> Config:
    """With what the tokenizer and the data decide filled in. A vocabulary that is given needs no tokenizer's file."""
    letters = None if config.model.vocabulary else tokenizer.load(config.tokenizer)
    return replace(config, model=tokenizer.resolved(config, letters))


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
    config = resolve(config)
    if problems := rules.check(config, world, planning=True):
        raise ValueError("\n".join(problems))
    data, ring, ulysses = rules.mesh_of(config, world)
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
