"""Measure the kernels' tiles on this GPU: values first, then time.

    ringspan bench tune --save                           the portable kernels; writes docs/results/tiles-<device>.json
    ringspan bench tune --kernels hopper-forward hopper-backward --save tiles-hopper-h200
    ringspan bench tune --kernels dkdv --widths 128

Candidates of a head dim are compiled side by side first. Each must reproduce torch's own bf16 attention (a configuration can be
fast and wrong) and is then timed, causal, at 16k tokens and heads · width = 2048. The fastest go into triton_tiles.py and
hopper_tiles.py by hand, because what is read there should also be understood. No user's first step ever waits for tuning.
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
from ringspan.kernels.bench.measure import RESULTS, machine, slug
from ringspan.kernels.mask import Mask
from ringspan.kernels.runtime.ahead_of_time import compile_ahead
from ringspan.kernels.runtime.launch import Launch
from ringspan.kernels.runtime.triton_compat import chip

LENGTH = 16384
Tile = Any  # portable: (BLOCK_M, BLOCK_N, warps, stages); Hopper: what differs from hopper_tiles
PORTABLE = {"forward": 2, "dq": 3, "dkdv": 4}  # products that a kernel computes for each pair
HOPPER = {"hopper-forward": 2, "hopper-backward": 5}
WRITES = {"dq": ["dq"], "dkdv": ["dk", "dv"], "hopper-backward": ["dq_sum", "dk", "dv"]}  # the others: out
WRONG = 0.01  # relative RMS distance from torch's bf16 kernel
# (rows kept, rows streamed) with the (warps, stages) worth trying: what a kernel keeps is M, or N for dkdv
CANDIDATES: dict[int, list[Tile]] = {
    64: [
        (a, b, w, s)
        for a, b, w in [(64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (64, 32, 4)]
        for s in (2, 3, 4)
    ],
    128: [(a, b, w, s) for a, b, w in [(64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (128, 128, 8)] for s in (1, 2, 3)],
    256: [(a, b, w, s) for a, b, w in [(64, 32, 4), (64, 32, 8), (64, 64, 8), (128, 32, 8), (128, 64, 8)] for s in (1, 2, 3)],
}
TWO, THREE = dict(CONSUMERS=2, REGISTERS=240, maxnreg=168), dict(CONSUMERS=3, REGISTERS=160, maxnreg=128)
WHOLE, HALF = dict(DQ_STAGES=2, DQ_WIDTH=64), dict(DQ_STAGES=4, DQ_WIDTH=32)
HOPPER_CANDIDATES: dict[str, dict[int, list[Tile]]] = {
    "hopper-forward": {
        64: [
            c | dict(BLOCK_N=n, STAGES=s, STAGED=staged)
            for c in (TWO, THREE)
            for n in (64, 128)
            for s in (2, 3, 4, 5)
            for staged in (False, True)
        ]
        + [THREE | dict(BLOCK_N=128, STAGES=5, STAGED=False, IN_STEP=False)],
        128: [
            c | dict(BLOCK_N=n, STAGES=s, Q_STAGES=qs, STAGED=staged)
            for c in (TWO, THREE)
            for n, s in ((64, 3), (64, 4), (128, 2))
            for qs in (1, 2)
            for staged in (False, True)
        ]
        + [TWO | dict(BLOCK_N=128, STAGES=2, Q_STAGES=2, STAGED=True, IN_STEP=True)],
        256: [TWO | dict(BLOCK_N=n, STAGES=s, STAGED=False) for n, s in ((32, 2), (32, 4), (64, 2))]
        + [TWO | dict(BLOCK_N=64, STAGES=2, STAGED=False, IN_STEP=False)],
    },
    "hopper-backward": {
        64: [dict(STAGES=s, DS_STAGES=d, TIGHT=t) for s in (2, 3, 4) for d in (2, 3) for t in (False, True)],
        128: [
            dict(STAGES=2, DS_STAGES=d, TIGHT=t, **w)
            for d, w in ((1, WHOLE), (2, WHOLE), (2, HALF), (3, WHOLE))
            for t in (False, True)
        ]
        + [dict(STAGES=3, DS_STAGES=1, **WHOLE), dict(STAGES=3, DS_STAGES=2, **HALF | dict(DQ_STAGES=2))],
        256: [dict(DS_STAGES=1, **w) for w in (HALF | dict(DQ_STAGES=2), WHOLE | dict(DQ_STAGES=1))],
    },
}


def tensors(width: int, device: str) -> dict[str, Tensor]:
    size = (1, LENGTH, 2048 // width, width)
    made = {
        name: torch.empty(size, dtype=torch.bfloat16, device=device)
        for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
    }
    made["dq_sum"] = torch.zeros(size, device=device)
    stats = {name: torch.empty(1, size[2], LENGTH, device=device) for name in ("lse", "delta")}
    if device != "meta":
        for name in ("q", "k", "v", "dout"):
            made[name].normal_()
    return made | stats


def launch(kernel: str, width: int, tile: Tile, t: dict[str, Tensor]) -> Launch:
    """One launch with this tile, whatever the table says."""
    at = ((0, 1, LENGTH),)
    block = Block(t["q"], t["k"], t["v"], Mask(causal=True), at, at, scale=width**-0.5)
    gradients = Gradients(*(t[name] for name in Gradients._fields))
    if kernel in HOPPER:
        table = hopper_tiles.FORWARD if kernel == "hopper-forward" else hopper_tiles.BACKWARD
        before = table[width]
        table[width] = before | tile
        try:
            if kernel == "hopper-forward":
                return next(forward_launches(block, None, t["out"], t["lse"], hopper_forward.launch))
            return next(backward_launches(block, gradients._replace(dq=t["dq_sum"]), "dq", hopper_backward.launches))
        finally:
            table[width] = before
    a, b, warps, stages = tile
    sizes = (b, a) if kernel == "dkdv" else (a, b)
    triton_tiles.HOPPER[kernel] = triton_tiles.AMPERE[kernel] = triton_tiles.SMALL[kernel] = {256: (*sizes, warps, stages)}
    if kernel == "forward":
        return next(forward_launches(block, None, t["out"], t["lse"]))
    return list(backward_launches(block, gradients, False))[kernel == "dkdv"]


def compiles(job: tuple[str, int, Tile, str]) -> dict[str, Any]:
    kernel, width, tile, chip_name = job
    os.environ["RINGSPAN_CHIP"] = chip_name
    try:
        compiled = compile_ahead(launch(kernel, width, tile, tensors(width, "meta")), chip_name)
    except Exception as error:  # a tile that the compiler refuses is a finding, not a crash
        return {"status": f"does not compile: {type(error).__name__}"}
    return {"status": "compiled", "shared": compiled.shared, "registers": compiled.registers, "spills": compiled.spills}


def measure(kernel: str, width: int, tile: Tile, t: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Any]:
    from triton.testing import do_bench

    def call() -> None:
        launch(kernel, width, tile, t)()

    names = WRITES.get(kernel, ["out"])
    for name in names:
        t[name].fill_(0 if name == "dq_sum" else float("nan"))  # a sum is added to
    try:
        call()
    except Exception as error:
        return {"status": f"does not run: {type(error).__name__}"}
    error = max(float((t[n].float() - truth[n].float()).norm() / truth[n].float().norm()) for n in names)
    if not error <= WRONG:
        return {"status": "wrong", "error": error}
    ms = do_bench(call, warmup=30, rep=120, return_mode="median")
    flops = (PORTABLE | HOPPER)[kernel] * 2048 * LENGTH**2  # two for each multiply-add, half for the causal mask
    row = {"status": "ok", "error": error, "ms": ms, "tflops": flops / ms / 1e9}
    if not torch.version.hip:  # clocks drift from one candidate to the next
        row["mcycles"] = cycles_of(call, max(2, int(60 / ms)), t["q"].device) / 1e6
    return row


def truth_of(t: dict[str, Tensor]) -> dict[str, Tensor]:
    q, k, v = (t[name].detach().transpose(1, 2).requires_grad_() for name in "qkv")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), t["dout"].transpose(1, 2))
    truth = {name: x.detach().transpose(1, 2) for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)}
    return truth | {"dq_sum": truth["dq"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=[*PORTABLE, *HOPPER], default=list(PORTABLE))
    parser.add_argument("--widths", nargs="+", type=int, choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="write docs/results/NAME.json (default tiles-DEVICE)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are measured on a GPU, and torch sees none here")
    chip_name = chip(torch.device("cuda"))
    if chip_name != "sm_90" and set(arguments.kernels) & set(HOPPER):
        parser.error(f"this GPU is {chip_name}, and the Hopper kernels need sm_90: name {' '.join(PORTABLE)} with --kernels")
    command = f"ringspan bench tune --kernels {' '.join(arguments.kernels)} --widths {' '.join(map(str, arguments.widths))}"
    result = dict(kind="tiles", **machine(torch.device("cuda")), dtype="bf16", command=command, rows=[])
    path = arguments.json
    if path is None and arguments.save is not None:
        name = (arguments.save or f"tiles-{slug(result['device'])}").removesuffix(".json")
        path = RESULTS / f"{name}.json"
    for width in arguments.widths:
        result["rows"] += tune(arguments.kernels, width, chip_name)
        if path is not None:  # after each width: who is cut short keeps what was measured
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"written: {path}", flush=True)


def tune(kernels: list[str], width: int, chip_name: str) -> list[dict[str, Any]]:
    """A row for each candidate; prints the three fastest of each kernel."""
    jobs = [
        (kernel, width, tile)
        for kernel in kernels
        for tile in (HOPPER_CANDIDATES[kernel].get(width, []) if kernel in HOPPER else CANDIDATES[width])
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 2), mp_context=spawn) as pool:
        rows = [
            dict(kernel=k, width=w, tile=tile) | compiled
            for (k, w, tile), compiled in zip(jobs, pool.map(compiles, [(*job, chip_name) for job in jobs]), strict=True)
        ]
    t = tensors(width, "cuda")
    truth = truth_of(t)
    launch("forward", width, (64, 32, 4, 1), t)()  # the backward needs a right lse
    t["delta"].copy_(output_delta(t["dout"], t["out"]))
    for row in rows:
        if row["status"] == "compiled":
            row |= measure(row["kernel"], width, row["tile"], t, truth)
    for kernel in kernels:
        mine = [row for row in rows if row["kernel"] == kernel and row["status"] == "ok"]
        for row in sorted(mine, key=lambda row: row["ms"])[:3]:
            ms, spills = row["ms"], row["spills"]
            cycles = f", {row['mcycles']:.3f} million cycles" if "mcycles" in row else ""
            speed = f"{row['tflops']:.0f} TFLOP/s ({ms:.2f} ms{cycles}, {spills} B spilled)"
            print(f"{kernel} {width}: {row['tile']} {speed}", flush=True)
    return rows


if __name__ == "__main__":
    main()
