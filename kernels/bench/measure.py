"""Measurement of attention kernels: each must be correct before it is timed, and rounds alternate between the kernels.

measure() returns one row (a dict of plain values) per kernel. A kernel that fails, is not installed or does not support a shape
gets a row with the reason. This module also has the helpers that all benchmarks share: machine(), slug(), result_path().
"""

import contextlib
import datetime
import importlib.metadata
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan import ROOT
from ringspan.kernels.attention import attention
from ringspan.kernels.backends.choose import BACKENDS
from ringspan.kernels.bench.baselines import (
    BASELINES,
    DIRECTIONS,
    AttentionFn,
    AttentionKernel,
    errors,
    head_slice,
    probes,
    reference_results,
)
from ringspan.kernels.bench.shapes import Shape, mask_of

WRONG = 0.02  # relative RMS error: four times the tests' limit for our kernels in bf16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]
Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[], object]
CounterFn = Callable[[Call, float, float, torch.device], Row]  # (call, ms of the call, ms to measure, device) -> values


def results_folder(root: Path) -> Path:
    """Return docs/results of a checkout at `root`; results in the current folder for an installed package."""
    folder = root / "docs/results"
    return folder if folder.is_dir() else Path("results")


RESULTS = results_folder(ROOT)
SAVE_HELP = "write docs/results/NAME.json, without a checkout results/NAME.json"


def result_path(path: Path | None, name: str | None, default: str) -> Path | None:
    """Return the file that a benchmark writes, in a folder that exists; None if it writes no file.

    Args:
        path: the value of --json, which takes precedence.
        name: the value of --save; "" selects `default`, and None means that the option is absent.
        default: name of the result in RESULTS, which is created if needed.

    Raises:
        ValueError: the folder does not exist and cannot be created.
    """
    if path is None and name is not None:
        path = RESULTS / f"{(name or default).removesuffix('.json')}.json"
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder: make it first, or pass another path with --json")
    return path


def _attention(backend: str, q: Tensor, k: Tensor, v: Tensor, shape: Shape, deterministic: bool = False) -> Tensor:
    if backend == "reference":
        shape.check_dense(q.device)
    out = attention(q, k, v, mask=mask_of(shape), deterministic=deterministic, backend=backend)
    assert isinstance(out, Tensor)
    return out


def default_devices(backend: str) -> tuple[str, ...]:
    """Return the device types that measure a backend of ours by default."""
    return ("cuda",) if backend == "hopper" else ("cuda", "cpu")


def kernels() -> dict[str, AttentionKernel]:
    """Return every kernel by name: our backends, the deterministic Hopper backward, and the baselines."""
    ours = {name: AttentionKernel(f"Ringspan {name}", partial(_attention, name), default_devices(name)) for name in BACKENDS}
    deterministic = partial(_attention, "hopper", deterministic=True)
    ordered = AttentionKernel("Ringspan hopper, deterministic", deterministic, default_devices("hopper"))
    return ours | {"hopper-ordered": ordered} | BASELINES  # the other backends are always deterministic


def check(run: AttentionFn, inputs: Inputs, dout: Tensor, references: list[list[Tensor]], shape: Shape) -> Row:
    """Return a row with errors and memory, and status "ok" or "wrong"."""
    out = run(*inputs, shape)  # compiles and tunes, so memory is measured on later calls
    results = (out, *torch.autograd.grad(out, inputs, dout))
    if not all(bool(x.isfinite().all()) for x in results):
        return {"status": "wrong", "note": "NaN or infinity in out or gradients", "error_out": None, "error_grad": None}
    error_out, *error_grads = errors(results, references, shape)
    row: Row = {"error_out": error_out, "error_grad": max(error_grads)}
    if max(row.values()) > WRONG:
        return row | {"status": "wrong", "note": f"error above {WRONG}"}
    del out, results
    return row | {"status": "ok"} | (peak_memory(run, inputs, dout, shape) if dout.is_cuda else {})


def peak_memory(run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape) -> Row:
    """Return the peak MiB of a forward, and of a forward with its backward, beyond inputs, output and gradients."""
    cuda, sizes = torch.cuda, {}
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    base = cuda.memory_allocated()
    out = run(*inputs, shape)
    base += out.nbytes
    cuda.synchronize()
    sizes["forward_mib"] = (cuda.max_memory_allocated() - base) / 2**20
    grads = torch.autograd.grad(out, inputs, dout)
    cuda.synchronize()
    sizes["backward_mib"] = (cuda.max_memory_allocated() - base - sum(x.nbytes for x in grads)) / 2**20
    return sizes


def median_ms(call: Callable[[], object], rep: float, device: torch.device) -> float:
    """Return the median ms of a call, over as many calls as fit into `rep` ms."""

    def timed_call() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000

    first = timed_call()
    if first > 5 * rep:  # do_bench would make at least eight such calls
        return first
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=int(rep / 2), rep=int(rep), return_mode="median")
    times = [timed_call() for _ in range(3)]
    while sum(times) < rep:
        times.append(timed_call())
    return statistics.median(times)


def call_of(direction: str, run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape) -> Call:
    """Return the call that is timed for a direction.

    The backward uses autograd.grad. backward() would also copy gradients whose strides differ from their leaf's; in a model
    q, k and v are not leaves, so it never makes that copy.
    """
    if direction == "forward":
        return lambda: run(*inputs, shape)
    out = run(*inputs, shape)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def time_round(run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape, rep: float) -> tuple[float, ...]:
    """Return the median ms of forward and backward."""
    return tuple(median_ms(call_of(direction, run, inputs, dout, shape), rep, dout.device) for direction in DIRECTIONS)


def count_all(
    counters: list[CounterFn], run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape, row: Row, rep: float
) -> Row:
    """Return the values of all counters for both directions, with keys such as forward_mcycles."""
    values: Row = {}
    for direction in DIRECTIONS:
        call = call_of(direction, run, inputs, dout, shape)
        for counter in counters:
            counted = counter(call, row[f"{direction}_ms"], rep, dout.device)
            values |= {f"{direction}_{key}": value for key, value in counted.items()}
    return values


def random_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and dout, equal in every call."""
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    widths = (shape.head_dim, shape.head_dim, shape.v_width, shape.v_width)
    sizes = ((shape.batch, shape.length, n, width) for n, width in zip(heads, widths, strict=True))
    return [torch.randn(size, device=device, dtype=dtype) for size in sizes]


def measure(
    shape: Shape, names: list[str], device: torch.device, dtype: torch.dtype, rounds: int, rep: float, counters: list[CounterFn]
) -> list[Row]:
    """Check and time kernels on one shape.

    Args:
        names: kernels to measure, see kernels().
        rounds: each round times every kernel once; every other round runs in reverse order.
        rep: ms to time each kernel for, per round and direction.
        counters: further measurements of a call, for example count_cycles.

    Returns:
        One row per kernel, in the order of `names`.
    """
    table = kernels()
    print(
        f"{shape.name}: the reference, then {len(names)} kernels; the first call of each compiles", file=sys.stderr, flush=True
    )
    q, k, v, dout = random_inputs(shape, device, dtype)
    references = [reference_results(head_slice((q, k, v, dout), shape, *probe), shape) for probe in probes(shape)]
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    rows: list[Row] = []
    for name in names:
        row: Row = {"shape": shape.name, "kernel": name, "label": table[name].label, "ours": name not in BASELINES, "note": ""}
        row["tiles"] = shape.tiles()
        rows.append(row | attempt(check, table[name].run, inputs, dout, references, shape))
        print(f"{shape.name} {name}: {rows[-1]['status']} {rows[-1]['note']}".rstrip(), file=sys.stderr, flush=True)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for index in range(rounds):
        print(f"{shape.name}: round {index + 1} of {rounds}", file=sys.stderr, flush=True)
        for row in rows[:: -1 if index % 2 else 1]:  # a kernel starts at the clock that the previous one caused
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
        if row["status"] == "ok" and counters:
            counted = attempt(count_all, counters, table[row["kernel"]].run, inputs, dout, shape, row, rep)
            row |= {"note": counted["note"]} if "status" in counted else counted  # the times stay valid if counting fails
    return rows


class RefusedError(RuntimeError):
    """A baseline was tried on a setting and refused it."""


def attempt(call: Callable[..., Any], *args: object) -> Any:
    """Return the result of a call; if it raises, a partial row with status and note, so that other kernels still run."""
    try:
        return call(*args)
    except ImportError as error:
        result: Row = {"status": "skipped", "note": f"not installed: {error}"}
    except ValueError as error:
        result = {"status": "skipped", "note": str(error)}
    except RefusedError as error:
        result = {"status": "refused", "note": str(error)}
    except Exception as error:  # compilers and drivers raise many types
        result = {"status": "failed", "note": f"{type(error).__name__}: {error}"}
    result["note"] = " ".join(result["note"].split())[:400]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # after an out-of-memory error the next kernel needs all of it
    return result


def speeds(times: list[tuple[float, ...]], flops: float) -> Row:
    """Return TFLOP/s over the rounds: median, slowest and fastest per direction, and the median of both together."""
    row: Row = {"both_tflops": statistics.median(3.5 * flops / (f + b) / 1e9 for f, b in times)}
    for name, factor, ms in (("forward", 1.0, [f for f, _ in times]), ("backward", 2.5, [b for _, b in times])):
        rates = [factor * flops / t / 1e9 for t in ms]
        row |= {f"{name}_ms": statistics.median(ms), f"{name}_tflops": statistics.median(rates)}
        row |= {f"{name}_tflops_min": min(rates), f"{name}_tflops_max": max(rates)}
    return row


def machine(device: torch.device) -> Row:
    """Return the provenance of a result: device, date, commit (None outside a checkout) and versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "flash-attn-4", "flash-attn-3", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        versions["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    is_checkout = (ROOT / ".git").exists()  # site-packages may lie in the repository of another project
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "describe", "--always", "--dirty", "--exclude=*") or None if is_checkout else None,
        "versions": {name: version for name, version in versions.items() if version},
    }


def _output(*command: str) -> str:
    """Standard output of a command; empty if it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return ""


def slug(name: str) -> str:
    """Return a device's name for use in file names: "NVIDIA H200" is h200; any CPU is cpu."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "cpu" if words[0] == "cpu" else "-".join(word for word in words if word not in ("nvidia", "amd"))
