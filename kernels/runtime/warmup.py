"""Compile the kernels of attention calls into Triton's cache before their first use: `compile_all`.

A kernel depends on head dims, dtype, mask and options, not on lengths or batch sizes (launch.any_sizes). So each call runs once
on meta tensors, whose launches only compile. With fewer KV heads than query heads, Hopper's backward has a second version for
some lengths, and a sum of its results (`num_head_splits` in hopper/arguments.py). Forward and backward of each call are jobs
of a pool of processes. The key of Triton's cache contains the chip, the kernel's source and the versions, not the machine: a
machine without a GPU fills the cache for one that has it.
"""

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ringspan.kernels.mask import Mask

LENGTH = 256
GROUPED_LENGTHS = LENGTH, 2048, 4096, 8192, 16384  # of a backward with fewer KV heads than query heads
WINDOWS = 128, 2**16  # at some head dims the forward has other tiles for short ones (hopper/tile_sizes.py)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")  # chips that a machine without them can name
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class AttentionCall:
    """What the kernels of a call of `attention` depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bf16"
    causal: bool = True
    window: bool = False
    documents: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    backend: str = "auto"

    def __str__(self) -> str:
        names = ("causal", "window", "documents", "softcap", "sinks", "dropout", "deterministic")
        widths = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        options = [name for name in names if getattr(self, name)]
        return " ".join([f"{self.heads}/{self.kv_heads}x{widths}", self.dtype, *options])


class Job(NamedTuple):
    """One direction of a call, compiled by one process."""

    call: AttentionCall
    direction: str  # "forward" or "backward"


class JobResult(NamedTuple):
    """The result of a job."""

    job: Job
    kernels: dict[str, bool]  # name: whether it was in the cache
    seconds: float
    error: str = ""


def current_target() -> str | None:
    """Return the chip of this machine's GPU, "sm_90" or "gfx942"; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def compile_all(calls: list[AttentionCall], target: str, processes: int) -> Iterator[JobResult]:
    """Compile the kernels of all calls for a chip; yield each job's result as it ends."""
    jobs = [Job(call, direction) for call in dict.fromkeys(calls) for direction in ("forward", "backward")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), context, _initialize, (environment, target)) as pool:
        for done in as_completed([pool.submit(compile_job, job) for job in jobs]):
            yield done.result()


def _initialize(environment: dict[str, str], target: str) -> None:
    """Prepare a process of the pool before it imports Triton, which reads the environment."""
    os.environ.clear()
    os.environ.update(environment)
    compile_for(target)


def compile_for(target: str) -> None:
    """Make this process compile for a chip, which it may not have."""
    from ringspan.kernels.runtime.ahead_of_time import select_target
    from ringspan.kernels.runtime.triton_compat import chip

    if current_target() != target:
        os.environ["RINGSPAN_CHIP"] = target
    os.environ["RINGSPAN_CHIP"] = chip(torch.device("meta"))  # tile sizes, see triton_compat
    select_target(target)


def compile_job(job: Job) -> JobResult:
    """Compile one direction of a call in this process."""
    import triton

    kernels: dict[str, bool] = {}

    def record(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        kernels[src.name] = cache_hit and kernels.get(src.name, True)

    triton.knobs.compilation.listener = record
    start, error = time.perf_counter(), ""
    try:
        run_on_meta(job)
    except Exception as problem:  # any error of a compiler; the other jobs go on
        error = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
    return JobResult(job, kernels, time.perf_counter() - start, error)


def run_on_meta(job: Job) -> None:
    """Run one direction of a call on meta tensors: its launches compile and launch nothing."""
    from ringspan.kernels.attention import sink_carry
    from ringspan.kernels.blocks import block_backward, block_forward, output_delta

    call = job.call
    options: dict[str, Any] = dict(softcap=20.0 * call.softcap, backend=call.backend, deterministic=call.deterministic)
    options |= dict(dropout=0.1, seed=0) if call.dropout else {}
    lengths = GROUPED_LENGTHS if job.direction == "backward" and call.kv_heads < call.heads else (LENGTH,)
    for length, window in itertools.product(lengths, WINDOWS if call.window else (None,)):
        sizes = ((call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.v_head_dim))
        q, k, v = (torch.empty(1, length, *size, dtype=DTYPES[call.dtype], device="meta") for size in sizes)
        documents = torch.zeros(length, dtype=torch.int32, device="meta") if call.documents else None
        mask = Mask(causal=call.causal, window=window, documents=documents)
        if job.direction == "forward":
            sinks = torch.empty(call.heads, device="meta")
            block_forward(q, k, v, mask, carry=sink_carry(sinks, q) if call.sinks else None, **options)
            continue
        lse = torch.empty(1, call.heads, length, dtype=torch.float32, device="meta")
        out = torch.empty(1, length, call.heads, call.v_head_dim, dtype=q.dtype, device="meta")
        delta = output_delta(out, out, backend=call.backend)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        block_backward(out, q, k, v, lse, delta, mask, None, None, dq, dk, dv, accumulate=False, **options)


def report(results: Iterator[JobResult], count: int, show: Callable[[str], None]) -> tuple[int, int, int]:
    """Show each result; return the number of compiled kernels, of cached kernels and of failed jobs."""
    compiled = cached = failed = 0
    for number, (job, kernels, seconds, error) in enumerate(results, 1):
        new = [name for name, was_cached in kernels.items() if not was_cached]
        state = error or (f"compiled {', '.join(new)}" if new else "in the cache")
        show(f"[{number}/{count}] {job.call} {job.direction}: {state} ({seconds:.1f} s)")
        compiled, cached, failed = compiled + len(new), cached + len(kernels) - len(new), failed + bool(error)
    return compiled, cached, failed
