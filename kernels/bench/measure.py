"""One kernel after another: each has to be right before it is timed, and then they take turns. What `bench` measures with."""

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
from typing import Any

import torch
from torch import Tensor

from ringspan import ROOT
from ringspan.kernels.attention import BACKENDS, attention
from ringspan.kernels.bench.baselines import PEERS, WAYS, AttentionFn, AttentionKernel, errors, part, probes, truth
from ringspan.kernels.bench.shapes import Shape, mask_of

RESULTS = ROOT / "docs/results"  # of a checkout
WRONG = 0.02  # relative RMS error: four times what the tests allow our own kernels in bf16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]
Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[], object]
Count = Callable[[Call, float, float, torch.device], Row]  # of a call that takes so many ms, in about so many ms, on a device


def _ours(backend: str, q: Tensor, k: Tensor, v: Tensor, shape: Shape, deterministic: bool = False) -> Tensor:
    if backend == "reference":
        shape.check_dense(q.device)
    return attention(q, k, v, mask=mask_of(shape), deterministic=deterministic, backend=backend)


def devices(backend: str) -> tuple[str, ...]:
    return ("cuda",) if backend == "hopper" else ("cuda", "cpu")


def kernels() -> dict[str, AttentionKernel]:
    ours = {name: AttentionKernel(f"Ringspan {name}", partial(_ours, name), devices(name)) for name in BACKENDS}
    ordered = AttentionKernel("Ringspan hopper, deterministic", partial(_ours, "hopper", deterministic=True), devices("hopper"))
    return ours | {"hopper-ordered": ordered} | PEERS  # the others always are


def check(run: AttentionFn, inputs: Inputs, dout: Tensor, truths: list[list[Tensor]], shape: Shape) -> Row:
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


def peak_memory(run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape) -> Row:
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


def call_of(way: str, run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape) -> Call:
    """A backward goes through autograd.grad: backward() would copy gradients whose strides differ from their leaf's, which a
    model's q, k and v, being no leaves, never pay for."""
    if way == "forward":
        return lambda: run(*inputs, shape)
    out = run(*inputs, shape)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def time_round(run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape, rep: float) -> tuple[float, ...]:
    """ms, of each way."""
    return tuple(median_ms(call_of(way, run, inputs, dout, shape), rep, dout.device) for way in WAYS)


def count_all(counts: list[Count], run: AttentionFn, inputs: Inputs, dout: Tensor, shape: Shape, row: Row, rep: float) -> Row:
    found: Row = {}
    for way in WAYS:
        call = call_of(way, run, inputs, dout, shape)
        for count in counts:
            found |= {f"{way}_{what}": n for what, n in count(call, row[f"{way}_ms"], rep, dout.device).items()}
    return found


def random_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, the same ones every time."""
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = ((shape.batch, shape.length, n, shape.head_dim) for n in heads)
    return [torch.randn(size, device=device, dtype=dtype) for size in sizes]


def measure(
    shape: Shape, names: list[str], device: torch.device, dtype: torch.dtype, rounds: int, rep: float, counts: list[Count]
) -> list[Row]:
    """A row for each kernel, with what is to be counted beside its time."""
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
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
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
        if row["status"] == "ok" and counts:
            counted = attempt(count_all, counts, table[row["kernel"]].run, inputs, dout, shape, row, rep)
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


def speeds(times: list[tuple[float, ...]], flops: float) -> Row:
    """TFLOP/s over the rounds: median, slowest, fastest; and the two passes together."""
    row: Row = {"both_tflops": statistics.median(3.5 * flops / (f + b) / 1e9 for f, b in times)}
    for name, factor, ms in (("forward", 1.0, [f for f, _ in times]), ("backward", 2.5, [b for _, b in times])):
        rates = [factor * flops / t / 1e9 for t in ms]
        row |= {f"{name}_ms": statistics.median(ms), f"{name}_tflops": statistics.median(rates)}
        row |= {f"{name}_tflops_min": min(rates), f"{name}_tflops_max": max(rates)}
    return row


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
