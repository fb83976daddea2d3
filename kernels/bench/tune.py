"""Tuner of tile sizes: `ringspan bench tune` measures the candidates of each kernel on this GPU.

    ringspan bench tune --save                           the portable kernels; writes docs/results/tiles-<device>.json
    ringspan bench tune --kernels hopper-forward hopper-backward --save tiles-hopper-h200
    ringspan bench tune --kernels dkdv --widths 128

The candidates of a head dim are first compiled in parallel. Each must then reproduce torch's own bf16 attention, because a
configuration can be fast and wrong. It is timed with a causal mask, 16,384 tokens and heads × width = 2048. The fastest ones
are entered into triton/tile_sizes.py and hopper/tile_sizes.py by hand, where a comment can explain them. No kernel is tuned
during a user's run.
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.kernels.backends.block import Block, Gradients
from ringspan.kernels.backends.hopper import backward as hopper_backward
from ringspan.kernels.backends.hopper import forward as hopper_forward
from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
from ringspan.kernels.backends.triton import tile_sizes as triton_tiles
from ringspan.kernels.backends.triton.backward import backward_launches, output_delta
from ringspan.kernels.backends.triton.forward import forward_launches
from ringspan.kernels.bench.clock_cycles import cycles_of
from ringspan.kernels.bench.measure import SAVE_HELP, machine, result_path, slug
from ringspan.kernels.mask import Mask
from ringspan.kernels.runtime.ahead_of_time import compile_ahead
from ringspan.kernels.runtime.launch import Launch
from ringspan.kernels.runtime.triton_compat import chip

LENGTH = 16384
Tile = Any  # portable: (rows kept, rows streamed, warps, stages); Hopper: the options that differ from the table
PORTABLE = {"forward": 2, "dq": 3, "dkdv": 4}  # matmuls of a kernel for each pair of tiles
HOPPER = {"hopper-forward": 2, "hopper-backward": 5}
OUTPUTS = {"dq": ["dq"], "dkdv": ["dk", "dv"], "hopper-backward": ["dq_sum", "dk", "dv"]}  # the other kernels: out
WRONG = 0.01  # relative RMS distance from torch's bf16 kernel
# A kernel keeps a tile of BLOCK_M queries and streams BLOCK_N keys; dkdv keeps BLOCK_N keys and streams BLOCK_M queries.
CANDIDATES: dict[int, list[Tile]] = {
    64: [
        (a, b, w, s)
        for a, b, w in [(64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (64, 32, 4)]
        for s in (2, 3, 4)
    ],
    128: [(a, b, w, s) for a, b, w in [(64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (128, 128, 8)] for s in (1, 2, 3)],
    256: [(a, b, w, s) for a, b, w in [(64, 32, 4), (64, 32, 8), (64, 64, 8), (128, 32, 8), (128, 64, 8)] for s in (1, 2, 3)],
}
TWO_CONSUMERS = dict(CONSUMERS=2, REGISTERS=240, maxnreg=168)
THREE_CONSUMERS = dict(CONSUMERS=3, REGISTERS=160, maxnreg=128)
DQ_64, DQ_32 = dict(DQ_STAGES=2, DQ_WIDTH=64), dict(DQ_STAGES=4, DQ_WIDTH=32)
HOPPER_CANDIDATES: dict[str, dict[int, list[Tile]]] = {
    "hopper-forward": {
        64: [
            c | dict(BLOCK_N=n, STAGES=s, STAGED=staged)
            for c in (TWO_CONSUMERS, THREE_CONSUMERS)
            for n in (64, 128)
            for s in (2, 3, 4, 5)
            for staged in (False, True)
        ]
        + [THREE_CONSUMERS | dict(BLOCK_N=128, STAGES=5, STAGED=False, IN_STEP=False)],
        128: [
            c | dict(BLOCK_N=n, STAGES=s, Q_STAGES=qs, STAGED=staged)
            for c in (TWO_CONSUMERS, THREE_CONSUMERS)
            for n, s in ((64, 3), (64, 4), (128, 2))
            for qs in (1, 2)
            for staged in (False, True)
        ]
        + [TWO_CONSUMERS | dict(BLOCK_N=128, STAGES=2, Q_STAGES=2, STAGED=True, IN_STEP=True)],
        256: [TWO_CONSUMERS | dict(BLOCK_N=n, STAGES=s, STAGED=False) for n, s in ((32, 2), (32, 4), (64, 2))]
        + [TWO_CONSUMERS | dict(BLOCK_N=64, STAGES=2, STAGED=False, IN_STEP=False)],
    },
    "hopper-backward": {
        64: [dict(STAGES=s, DS_STAGES=d, TIGHT=t) for s in (2, 3, 4) for d in (2, 3) for t in (False, True)],
        128: [
            dict(STAGES=2, DS_STAGES=d, TIGHT=t, **w)
            for d, w in ((1, DQ_64), (2, DQ_64), (2, DQ_32), (3, DQ_64))
            for t in (False, True)
        ]
        + [dict(STAGES=3, DS_STAGES=1, **DQ_64), dict(STAGES=3, DS_STAGES=2, **DQ_32 | dict(DQ_STAGES=2))],
        256: [dict(DS_STAGES=1, **w) for w in (DQ_32 | dict(DQ_STAGES=2), DQ_64 | dict(DQ_STAGES=1))],
    },
}


def make_tensors(width: int, device: str) -> dict[str, Tensor]:
    """Return inputs and outputs of all kernels by name; random inputs unless the device is meta."""
    size = (1, LENGTH, 2048 // width, width)
    inputs = {
        name: torch.empty(size, dtype=torch.bfloat16, device=device)
        for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
    }
    inputs["dq_sum"] = torch.zeros(size, device=device)
    stats = {name: torch.empty(1, size[2], LENGTH, device=device) for name in ("lse", "delta")}
    if device != "meta":
        for name in ("q", "k", "v", "dout"):
            inputs[name].normal_()
    return inputs | stats


def make_launch(kernel: str, width: int, tile: Tile, t: dict[str, Tensor]) -> Launch:
    """Return a launch of a kernel with this tile in place of the table's."""
    at = ((0, 1, LENGTH),)
    block = Block(t["q"], t["k"], t["v"], Mask(causal=True), at, at, scale=width**-0.5)
    gradients = Gradients(*(t[name] for name in Gradients._fields))
    if kernel in HOPPER:
        table = hopper_tiles.FORWARD if kernel == "hopper-forward" else hopper_tiles.BACKWARD
        original = table[width, width]
        table[width, width] = original | tile
        try:
            if kernel == "hopper-forward":
                return next(forward_launches(block, None, t["out"], t["lse"], hopper_forward.launch))
            return next(backward_launches(block, gradients._replace(dq=t["dq_sum"]), "dq", hopper_backward.launches))
        finally:
            table[width, width] = original
    kept, streamed, warps, stages = tile
    sizes = (streamed, kept) if kernel == "dkdv" else (kept, streamed)
    triton_tiles.HOPPER[kernel] = triton_tiles.AMPERE[kernel] = triton_tiles.SMALL[kernel] = {256: (*sizes, warps, stages)}
    if kernel == "forward":
        return next(forward_launches(block, None, t["out"], t["lse"]))
    return list(backward_launches(block, gradients, False))[kernel == "dkdv"]


def compile_candidate(job: tuple[str, int, Tile, str]) -> dict[str, Any]:
    """Compile (kernel, width, tile, chip) in a worker process; return its registers and spills, or why it fails."""
    kernel, width, tile, chip_name = job
    os.environ["RINGSPAN_CHIP"] = chip_name
    try:
        compiled = compile_ahead(make_launch(kernel, width, tile, make_tensors(width, "meta")), chip_name)
    except Exception as error:  # a tile that the compiler rejects is a result
        return {"status": f"does not compile: {type(error).__name__}"}
    return {"status": "compiled", "shared": compiled.shared, "registers": compiled.registers, "spills": compiled.spills}


def measure(kernel: str, width: int, tile: Tile, t: dict[str, Tensor], references: dict[str, Tensor]) -> dict[str, Any]:
    """Check a candidate against the references, then time it; return the fields of its row."""
    from triton.testing import do_bench

    def call() -> None:
        make_launch(kernel, width, tile, t)()

    names = OUTPUTS.get(kernel, ["out"])
    for name in names:
        t[name].fill_(0 if name == "dq_sum" else float("nan"))  # the kernel accumulates into dq_sum
    try:
        call()
    except Exception as error:
        return {"status": f"does not run: {type(error).__name__}"}
    distance = max(float((t[n].float() - references[n].float()).norm() / references[n].float().norm()) for n in names)
    if not distance <= WRONG:
        return {"status": "wrong", "error": distance}
    ms = do_bench(call, warmup=30, rep=120, return_mode="median")
    flops = (PORTABLE | HOPPER)[kernel] * 2048 * LENGTH**2  # two per multiply-add, halved by the causal mask
    row = {"status": "ok", "error": distance, "ms": ms, "tflops": flops / ms / 1e9}
    if not torch.version.hip:  # cycles do not drift between candidates as clocks do
        row["mcycles"] = cycles_of(call, max(2, int(60 / ms)), t["q"].device) / 1e6
    return row


def reference_results(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return out and gradients of torch's own bf16 attention."""
    q, k, v = (t[name].detach().transpose(1, 2).requires_grad_() for name in "qkv")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), t["dout"].transpose(1, 2))
    references = {name: x.detach().transpose(1, 2) for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)}
    return references | {"dq_sum": references["dq"]}


def main(argv: list[str] | None = None) -> int:
    """Tune the kernels that the options name; return 0."""
    parser = argparse.ArgumentParser(
        prog="ringspan bench tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kernels = [*PORTABLE, *HOPPER]
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=list(PORTABLE), help="default: the portable kernels")
    parser.add_argument(
        "--widths", nargs="+", type=int, choices=list(CANDIDATES), default=list(CANDIDATES), help="head dims (default: all)"
    )
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=f"{SAVE_HELP} (default tiles-DEVICE)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("tiles are measured on a GPU, and torch sees none here")
    chip_name = chip(torch.device("cuda"))
    if chip_name != "sm_90" and set(args.kernels) & set(HOPPER):
        parser.error(f"this GPU is {chip_name}, and the Hopper kernels need sm_90: name {' '.join(PORTABLE)} with --kernels")
    command = f"ringspan bench tune --kernels {' '.join(args.kernels)} --widths {' '.join(map(str, args.widths))}"
    result = dict(kind="tiles", **machine(torch.device("cuda")), dtype="bf16", command=command, rows=[])
    try:
        path = result_path(args.json, args.save, f"tiles-{slug(result['device'])}")
    except ValueError as error:
        parser.error(str(error))
    for width in args.widths:
        result["rows"] += tune(args.kernels, width, chip_name)
        if path is not None:  # after each width, so that an interrupted run keeps its results
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"written: {path}", flush=True)
    return 0


def tune(kernels: list[str], width: int, chip_name: str) -> list[dict[str, Any]]:
    """Measure all candidates of a head dim; print the three fastest of each kernel and return a row per candidate."""
    jobs = [
        (kernel, width, tile)
        for kernel in kernels
        for tile in (HOPPER_CANDIDATES[kernel].get(width, []) if kernel in HOPPER else CANDIDATES[width])
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 2), mp_context=spawn) as pool:
        rows = [
            dict(kernel=k, width=w, tile=tile) | compiled
            for (k, w, tile), compiled in zip(
                jobs, pool.map(compile_candidate, [(*job, chip_name) for job in jobs]), strict=True
            )
        ]
    t = make_tensors(width, "cuda")
    references = reference_results(t)
    make_launch("forward", width, (64, 32, 4, 1), t)()  # the backward needs a correct lse
    t["delta"].copy_(output_delta(t["dout"], t["out"]))
    for row in rows:
        if row["status"] == "compiled":
            row |= measure(row["kernel"], width, row["tile"], t, references)
    for kernel in kernels:
        valid = [row for row in rows if row["kernel"] == kernel and row["status"] == "ok"]
        for row in sorted(valid, key=lambda row: row["ms"])[:3]:
            ms, spills = row["ms"], row["spills"]
            cycles = f", {row['mcycles']:.3f} million cycles" if "mcycles" in row else ""
            speed = f"{row['tflops']:.0f} TFLOP/s ({ms:.2f} ms{cycles}, {spills} B spilled)"
            print(f"{kernel} {width}: {row['tile']} {speed}", flush=True)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
