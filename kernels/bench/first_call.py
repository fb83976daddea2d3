"""Time of a process's first forward and backward: with an empty cache on disk, and with a full one.

    ringspan bench first-call                            on this GPU; shapes of five head dims, a few minutes
    ringspan bench first-call d128-causal-4k --save
    ringspan bench first-call --target sm_90             without a GPU: compiles only, which is most of the time
    ringspan bench first-call --compare                  also without the threads of kernels/runtime/precompile.py

In a GPU build of torch the thread of the hash starts at the import, so the way without threads has that one as well.
Each measurement is a process of its own. The time begins after imports, when inputs are made and Triton's files are hashed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ringspan.kernels.attention  # noqa: F401  (registers the operators)
from ringspan.kernels.bench.measure import SAVE_HELP, machine, result_path, slug
from ringspan.kernels.bench.shapes import SHAPES, Shape, mask_of
from ringspan.kernels.runtime import precompile
from ringspan.kernels.runtime.custom_op import without_dispatcher
from ringspan.kernels.runtime.warmup import TARGETS, compile_for

PROGRAM = "ringspan bench first-call"
DEFAULT = ("d64-causal-16k", "d96-causal-16k", "d128-causal-16k", "d192-128-causal-8k", "d256-causal-16k")
RUNS = ("cold", "cached")


def first_call(shape: Shape, target: str | None, sequential: bool) -> dict[str, float]:
    """Return the seconds of this process's first forward and backward; with a target it compiles both on meta tensors.

    It calls the operators, because `attention` on meta tensors computes shapes only. If sequential, inputs need no gradient, so
    that the forward compiles no backward.
    """
    if target is not None:
        compile_for(target)
    device = "cuda" if target is None else "meta"
    widths = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_width)
    q, k, v = (
        torch.zeros(shape.batch, shape.length, *width, device=device, dtype=torch.bfloat16, requires_grad=not sequential)
        for width in widths
    )
    left, right, has_padding, *tensors = mask_of(shape).bounds(q.device)
    args = q, k, v, *tensors, None, None, [left, right, int(has_padding), 0], [shape.head_dim**-0.5, 0.0, 0.0], "auto"
    if not sequential:
        precompile.start_hash_of_triton()
        precompile.hash_of_triton.join()  # a training process makes its model meanwhile
    _wait(device)
    began = time.perf_counter()
    with torch.no_grad():
        out, lse = without_dispatcher["attention_forward"](*args)
        _wait(device)
        middle = time.perf_counter()
        without_dispatcher["attention_backward"](out, None, out, lse, *args)
        _wait(device)
    return dict(forward_s=middle - began, backward_s=time.perf_counter() - middle)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, options: list[str], cache: str) -> list[dict[str, float]]:
    """Return the times of RUNS, each in a process of its own, with this folder as Triton's cache."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "ringspan.kernels.bench.first_call", name, "--child", *options]
    times = []
    for _ in RUNS:
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"{name}: {process.stderr.strip()[-500:]}")
        times.append(json.loads(process.stdout.splitlines()[-1]))
    return times


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=DEFAULT, metavar="SHAPE", help="as in `ringspan bench kernels`")
    parser.add_argument("--target", choices=TARGETS, help="only compile, for this chip")
    parser.add_argument("--rounds", type=int, default=3, help="of a cold and a cached process each (default %(default)s)")
    parser.add_argument("--compare", action="store_true", help="measure also without the threads of precompile.py")
    for name in ("--child", "--sequential"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=SAVE_HELP)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.shapes if name not in SHAPES]:
        parser.error(f"there is no shape {unknown[0]}: use {', '.join(SHAPES)}")
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: it must be at least 1")
    if args.child:
        print(json.dumps(first_call(SHAPES[args.shapes[0]], args.target, args.sequential)))
        return 0
    if args.target is None and not torch.cuda.is_available():
        parser.error("there is no GPU here: --target sm_90 measures compiling only")
    about = machine(torch.device("cpu" if args.target else "cuda"))
    try:
        path = result_path(args.json, args.save, f"first-calls-{slug(about['device'])}")
    except ValueError as error:
        parser.error(str(error))
    target = ["--target", args.target] if args.target else []
    command = " ".join([PROGRAM, *args.shapes, *target, "--rounds", str(args.rounds), *["--compare"] * args.compare])
    about |= dict(kind="first calls", cores=os.cpu_count(), target=args.target, command=command)
    rows: list[dict[str, Any]] = []
    print(f"{about['device']}; seconds of a process's first forward, backward and both", flush=True)
    for name in args.shapes:
        for sequential in [False, True][: 1 + args.compare] * args.rounds:
            with tempfile.TemporaryDirectory() as cache:
                times = measure(name, target + ["--sequential"] * sequential, cache)
            for run, row in zip(RUNS, times, strict=True):
                rows.append(dict(shape=name, cache=run, sequential=sequential) | row)
                forward, backward = row["forward_s"], row["backward_s"]
                text = f"{forward:6.2f} {backward:6.2f} {forward + backward:6.2f}" + "  sequential" * sequential
                print(f"{name:20} {run:6}  {text}", flush=True)
            if path is not None:  # after each measurement, so that a command that is cut leaves its results
                path.write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n")
    if path is not None:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
