"""How fast, how lean and how exact every attention backend is, beside every rival that is installed.

    python -m kernels.bench                                     # the shapes that matter, on whatever this machine has
    python -m kernels.bench --shapes d64-gqa4-causal-32k --only triton,fa4 --save
    python -m kernels.bench --roofline                          # what limits each, and how near it comes: see roofline.py
    python -m kernels.bench --only hopper --cycles              # clock cycles, to compare with those of another checkout

Every kernel gets the same inputs and first has to be right: out, dq, dk and dv of the first and the last KV head, at full
length, against the definition computed in fp32 (fp64 for fp32 inputs); and finite everywhere. Only then is it timed. Clocks
drift within minutes, so kernels take turns: a round times each once (the median of many calls), every other round the other
way round, and the median over rounds is reported beside the slowest and the fastest. Memory is what a call needs beyond inputs,
output and gradients.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import roofline
from .attention import BACKENDS, attention
from .peers import DEFAULT_SHAPES, PEERS, SHAPES, Kernel, Run, Shape, errors, mask_of, part, probes, truth
from .plots import draw_roofline

ROOT = Path(__file__).resolve().parent.parent
WRONG = 0.02  # relative RMS error: four times what the tests allow our own kernels in bf16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]
Inputs = tuple[Tensor, Tensor, Tensor]
WAYS = ("forward", "backward", "both")


def _ours(backend: str, q: Tensor, k: Tensor, v: Tensor, shape: Shape, deterministic: bool = False) -> Tensor:
    if backend == "reference":
        shape.check_dense()
    return attention(q, k, v, mask=mask_of(shape), deterministic=deterministic, backend=backend)


def devices(backend: str) -> tuple[str, ...]:
    return ("cuda",) if backend == "hopper" else ("cuda", "cpu")


def kernels() -> dict[str, Kernel]:
    ours = {name: Kernel(f"Ringspan {name}", partial(_ours, name), devices(name)) for name in BACKENDS}
    ordered = Kernel("Ringspan hopper, deterministic", partial(_ours, "hopper", deterministic=True), devices("hopper"))
    return ours | {"hopper-ordered": ordered} | PEERS  # the others always are


def check(run: Run, inputs: Inputs, dout: Tensor, truths: list[list[Tensor]], shape: Shape) -> Row:
    """A row with errors and memory, and status "ok" or "wrong"."""
    out = run(*inputs, shape)  # compiles and tunes, so memory is measured on later calls
    results = (out, *torch.autograd.grad(out, inputs, dout))
    if not all(bool(x.isfinite().all()) for x in results):
        return {"status": "wrong", "note": "NaN or infinity in out or gradients", "error_out": None, "error_grad": None}
    error_out, *error_grads = errors(results, truths, shape)
    row: Row = {"error_out": error_out, "error_grad": max(error_grads)}
    if max(row.values()) > WRONG:
        return row | {"status": "wrong", "note": f"error above {WRONG}"}
    del out, results
    return row | {"status": "ok"} | (peak_memory(run, inputs, dout, shape) if dout.is_cuda else {})


def peak_memory(run: Run, inputs: Inputs, dout: Tensor, shape: Shape) -> Row:
    """MiB that a forward, and a forward with its backward, need at their peak beyond what they take and give."""
    cuda, sizes = torch.cuda, {}
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    given = cuda.memory_allocated()
    out = run(*inputs, shape)
    given += out.nbytes
    cuda.synchronize()
    sizes["forward_mib"] = (cuda.max_memory_allocated() - given) / 2**20
    grads = torch.autograd.grad(out, inputs, dout)
    cuda.synchronize()
    sizes["backward_mib"] = (cuda.max_memory_allocated() - given - sum(x.nbytes for x in grads)) / 2**20
    return sizes


def median_ms(call: Callable[[], object], rep: float, device: torch.device) -> float:
    """The median of as many calls as fit into `rep` ms."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000

    first = once()
    if first > 5 * rep:  # do_bench would make eight such calls at least
        return first
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=int(rep / 2), rep=int(rep), return_mode="median")
    times = [once() for _ in range(3)]
    while sum(times) < rep:
        times.append(once())
    return statistics.median(times)


def time_round(run: Run, inputs: Inputs, dout: Tensor, shape: Shape, rep: float) -> tuple[float, float]:
    """Forward and backward in ms. The backward through autograd.grad: backward() would copy gradients whose strides
    differ from their leaf's, which a model's q, k and v, being no leaves, never pay for."""
    device = dout.device
    forward = median_ms(lambda: run(*inputs, shape), rep, device)
    out = run(*inputs, shape)
    backward = median_ms(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), rep, device)
    return forward, backward


def random_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, the same ones every time."""
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = ((shape.batch, shape.length, n, shape.head_dim) for n in heads)
    return [torch.randn(size, device=device, dtype=dtype) for size in sizes]


def measure(
    shape: Shape, names: list[str], device: torch.device, dtype: torch.dtype, rounds: int, rep: float, cycles: bool = False
) -> list[Row]:
    """A row for each kernel."""
    table = kernels()
    q, k, v, dout = random_inputs(shape, device, dtype)
    truths = [truth(part((q, k, v, dout), shape, *probe), shape) for probe in probes(shape)]
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    rows: list[Row] = []
    for name in names:
        row: Row = {"shape": shape.name, "kernel": name, "label": table[name].label, "ours": name not in PEERS, "note": ""}
        row["tiles"] = shape.tiles()
        rows.append(row | attempt(check, table[name].run, inputs, dout, truths, shape))
        print(f"{shape.name} {name}: {rows[-1]['status']} {rows[-1]['note']}".rstrip(), file=sys.stderr, flush=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for nth in range(rounds):
        for row in rows[:: -1 if nth % 2 else 1]:  # a kernel begins at the clock that the one before it left
            if row["status"] != "ok":
                continue
            result = attempt(time_round, table[row["kernel"]].run, inputs, dout, shape, rep)
            if isinstance(result, dict):
                row |= result
            else:
                times[row["kernel"]].append(result)
    for row in rows:
        if row["status"] == "ok":
            row |= speeds(times[row["kernel"]], shape.flops())
        if row["status"] == "ok" and cycles:
            from .cycles import of_both  # only here: it needs Triton

            counted = attempt(of_both, table[row["kernel"]].run, inputs, dout, shape, row, rep)
            row |= {"note": counted["note"]} if "status" in counted else counted  # its times stand all the same
    return rows


def attempt(call: Callable[..., Any], *args: object) -> Any:
    """What the call returns; if it fails, the part of a row that says so. One kernel's failure must not end the others."""
    try:
        return call(*args)
    except ImportError as error:
        result: Row = {"status": "skipped", "note": f"not installed: {error}"}
    except ValueError as error:
        result = {"status": "skipped", "note": str(error)}
    except Exception as error:  # anything a compiler or a driver can throw
        result = {"status": "failed", "note": f"{type(error).__name__}: {error}"}
    result["note"] = " ".join(result["note"].split())[:200]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # after running out of memory the next kernel deserves all of it
    return result


def speeds(times: list[tuple[float, float]], flops: float) -> Row:
    """TFLOP/s over the rounds: median, slowest, fastest; and the two passes together."""
    row: Row = {"both_tflops": statistics.median(3.5 * flops / (f + b) / 1e9 for f, b in times)}
    for name, factor, ms in (("forward", 1.0, [f for f, _ in times]), ("backward", 2.5, [b for _, b in times])):
        rates = [factor * flops / t / 1e9 for t in ms]
        row |= {f"{name}_ms": statistics.median(ms), f"{name}_tflops": statistics.median(rates)}
        row |= {f"{name}_tflops_min": min(rates), f"{name}_tflops_max": max(rates)}
    return row


def report(shape: Shape, rows: list[Row]) -> str:
    """The table of one shape, and our share of the best rival and of FlexAttention."""
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
    lines = [
        f"\n{shape.name}: batch {shape.batch}, {shape.length} tokens, {heads}; TFLOP/s (slowest-fastest round)",
        f"  {'':<15}{'forward':>9}{'':17}{'backward':>9}{'':17}{'both':>9}"
        + f"{'MiB fwd':>9}{'MiB bwd':>9}{'err out':>9}{'err grad':>9}",
    ]
    for row in rows:
        line = f"  {row['kernel']:<15}"
        if row["status"] == "ok":
            for way in ("forward", "backward"):
                low, high = row[f"{way}_tflops_min"], row[f"{way}_tflops_max"]
                line += f"{row[f'{way}_tflops']:>9.4g}{f'({low:.3g}-{high:.3g})':>17}"
            line += f"{row['both_tflops']:>9.4g}"
            line += "".join(f"{row[key]:>9.0f}" if key in row else f"{'-':>9}" for key in ("forward_mib", "backward_mib"))
        else:
            line += f"{row['status']}: {row['note']}"
        if row.get("error_out") is not None:
            line += f"{row['error_out']:>9.1e}{row['error_grad']:>9.1e}"
        if "forward_mcycles" in row:
            line += f"  {row['forward_mcycles']:.4f} / {row['backward_mcycles']:.4f} million cycles"
        lines.append(line)
    good = [row for row in rows if row["status"] == "ok"]
    ours, rivals = ([row for row in good if row["ours"] is mine] for mine in (True, False))
    for title, others in (("the best rival", rivals), ("FlexAttention", [row for row in rivals if row["kernel"] == "flex"])):
        if ours and others:
            lines.append(f"  ours of {title}: " + ", ".join(_share(f"{way}_tflops", ours, others) for way in WAYS))
    if ours:
        row = max(ours, key=lambda row: row["both_tflops"])
        each = ", ".join(f"{way} {1e6 * row[f'{way}_ms'] / row['tiles']:.3g} ns" for way in ("forward", "backward"))
        lines.append(f"  each of {row['tiles']:,} visible tiles of 128 × 128: {each} ({row['kernel']})")
    return "\n".join(lines)


def _share(field: str, ours: list[Row], others: list[Row]) -> str:
    mine, best = (max(rows, key=lambda row: row[field]) for rows in (ours, others))
    return f"{field.removesuffix('_tflops')} {mine[field] / best[field]:.0%} ({mine['kernel']} / {best['kernel']})"


def machine(device: torch.device) -> Row:
    """What a result depends on and cannot say itself."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "describe", "--always", "--dirty", "--exclude=*") or None,
        "versions": {name: version for name, version in found.items() if version},
    }


def _output(*command: str) -> str:
    """What a command prints; nothing if it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return ""


def slug(name: str) -> str:
    """NVIDIA H200 -> h200; any CPU is cpu."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "cpu" if words[0] == "cpu" else "-".join(word for word in words if word not in ("nvidia", "amd"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", metavar="NAME", choices=SHAPES, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--only", metavar="A,B", help=f"kernels to measure, of {', '.join(kernels())}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kernel has its turn (default %(default)s)")
    parser.add_argument("--rep", type=float, default=200, help="ms of one turn (default %(default)s)")
    parser.add_argument("--cycles", action="store_true", help="count clock cycles too: they do not drift as clocks do")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="write docs/results/NAME.json (default attention-DEVICE)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="what limits standard, chunked and flash attention (without a GPU: of saved results)",
    )
    parser.add_argument("--from", dest="saved", nargs="+", type=Path, metavar="JSON", help="with --roofline: measure nothing")
    parser.add_argument(
        "--plot", nargs="?", const="", metavar="PNG", help="with --roofline: draw it (default docs/roofline-DEVICE.png)"
    )
    return parser


def show_roofline(results: list[Row], plot: str | None, note: str) -> None:
    """The tables, and the picture if there is to be one."""
    for result in results:
        print(f"\n{roofline.report(result)}")
        if plot is not None:
            path = Path(plot) if plot else ROOT / "docs" / f"roofline-{slug(result['device'])}.png"
            draw_roofline(result, path)
            print(f"\ndrawn: {path}")
    print(f"\n{note}")


def saved_roofline(args: argparse.Namespace) -> None:
    """Of the results that are named, or of all that are about a chip with known peaks."""
    results = roofline.load(args.saved or sorted((ROOT / "docs/results").glob("attention-*.json")), args.shapes)
    if not args.saved:
        results = [result for result in results if result["device"] in roofline.CHIPS]
    results = [result for result in results if result["shapes"]]
    if not results:
        raise ValueError(f"no result has these shapes on {' or '.join(roofline.CHIPS)}: measure them there with --save")
    if args.plot and len(results) > 1:
        raise ValueError(f"--plot {args.plot} is one picture, and there are {len(results)} results: name one with --from")
    counted = any(f"{way}_dram_bytes" in row for result in results for row in result["rows"] for way in roofline.WAYS)
    there = "of the time of measuring" if counted else "not in these results; measure on a GPU with --roofline and --save"
    show_roofline(results, args.plot, f"ncu: DRAM bytes are {there}")


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if a kernel of ours is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.saved or args.plot is not None) and not args.roofline:
        parser.error("--from and --plot belong to --roofline: add it")
    if args.roofline and (args.saved or not torch.cuda.is_available()):
        for name in ("only", "device", "dtype", "rounds", "rep", "cycles", "save", "json"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} belongs to a measurement, and saved results are shown as they are: leave it out")
        try:
            saved_roofline(args)
        except (ValueError, ImportError) as error:
            parser.error(str(error))
        return 0
    if args.rounds < 1 or args.rep < 1:
        parser.error(f"--rounds {args.rounds} and --rep {args.rep:g} must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU here: use --device cpu")
    if args.cycles and (args.device == "cpu" or torch.version.hip):
        parser.error("--cycles reads the clocks of NVIDIA's multiprocessors: leave it out here")
    usual = [name for name, kernel in kernels().items() if args.device in kernel.devices]
    if args.roofline:
        usual = roofline.KERNELS
    names = list(dict.fromkeys(args.only.split(","))) if args.only else usual
    if unknown := [name for name in names if name not in kernels()]:
        parser.error(f"--only {','.join(unknown)}: the kernels are {', '.join(kernels())}")
    device, dtype = torch.device(args.device), args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    about, path = machine(device), args.json
    if args.roofline:
        try:
            roofline.chip_of(about | {"dtype": dtype})
        except ValueError as error:
            parser.error(str(error))
    if path is None and args.save is not None:
        path = ROOT / "docs/results" / f"{(args.save or 'attention-' + slug(about['device'])).removesuffix('.json')}.json"
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(exist_ok=True)
    if path is not None and not path.parent.is_dir():  # better now than after an hour of measuring
        parser.error(f"{path.parent} is no folder: make it first, or give a path with --json")
    warnings.filterwarnings("ignore")  # rivals explain at length why they do not run; the table says it in a line
    shapes = [SHAPES[name] for name in dict.fromkeys(args.shapes or DEFAULT_SHAPES[args.device])]
    print(about["device"], dtype, *(f"{name} {version}" for name, version in about["versions"].items()), sep=", ")
    only = ["--only", args.only] if args.only else []
    chosen = shlex.join(["--shapes", *(shape.name for shape in shapes), *only, "--device", args.device, "--dtype", dtype])
    chosen += f" --rounds {args.rounds} --rep {args.rep:g}" + " --cycles" * args.cycles + " --roofline" * args.roofline
    rows: list[Row] = []
    result = {"kind": "attention", **about, "dtype": dtype, "command": f"python -m kernels.bench {chosen}"}
    for index, shape in enumerate(shapes):
        its = measure(shape, names, device, DTYPES[dtype], args.rounds, args.rep, args.cycles)
        print(report(shape, its), flush=True)
        rows += its
        note = roofline.count(rows, dtype) if args.roofline and index + 1 == len(shapes) else ""
        result |= {"shapes": [asdict(shape) for shape in shapes[: index + 1]], "rows": rows}
        if path is not None:  # after each shape: who is cut short keeps what was measured
            path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if path is not None:
        print(f"\nwritten: {path}")
    if args.roofline:
        show_roofline([result], args.plot, note)
    return int(any(row["ours"] and row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
