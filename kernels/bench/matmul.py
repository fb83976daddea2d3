"""Measure matmuls by shape, heads, elementwise kernels and the optimizer: the speeds that `ringspan check` plans with.

    ringspan bench matmul --save        # less than a minute; writes docs/results/matmul-DEVICE.json

A linear layer (rows × inputs) · (inputs × outputs) has three matmuls: forward, input gradient and weight gradient. Each is
timed in bf16, as the median of several runs. A head is timed as the model calls it, with its cross-entropy: its logits are fp32
and exist for a chunk of tokens at a time. `make tables` copies the results into the planner's data.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ringspan.kernels.bench.measure import SAVE_HELP, machine, result_path, slug
from ringspan.kernels.loss import linear_cross_entropy

ROWS = (4096, 16384, 65536)  # tokens of a rank's micro-batch, or of a chunk of it
# (inputs, outputs) of the layers in conf/model: GPT-2 small, Qwen3 0.6B, Llama 1B and 8B.
LAYERS = (
    (768, 768), (768, 3072), (3072, 768),
    (1024, 1024), (1024, 2048), (2048, 1024), (1024, 3072), (3072, 1024),
    (2048, 512), (2048, 2048), (2048, 8192), (8192, 2048),
    (4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096),
)  # fmt: skip
# (inputs, vocabulary) of heads. GPT-2's vocabulary is odd, so that rows of its logits are not aligned; those of 50304 are.
HEADS = ((768, 50257), (768, 50304), (1024, 151936), (2048, 128256), (4096, 128256))
HEAD_TOKENS = 16384
DIRECTIONS = ("forward", "input_gradient", "weight_gradient")
ELEMENTS = 2**28  # of the elementwise kernel: far above L2
WEIGHTS = 2**27  # of the optimizer's step
LEAST_S, WARM_UP_S = 0.002, 3.0
Row = dict[str, Any]


def measure_layer(rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    """Return TFLOP/s of the three matmuls of a linear layer.

    Args:
        rows, inputs, outputs: the layer's shape.
        device: where it runs.
        dtype: dtype of all operands.
        repeats: timed runs of each.
    """
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    gradient = torch.randn(rows, outputs, device=device, dtype=dtype)
    calls: tuple[Callable[[], Any], ...] = (lambda: x @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ x)
    flops = 2 * rows * inputs * outputs
    speeds = {name: flops / seconds(call, device, repeats) / 1e12 for name, call in zip(DIRECTIONS, calls, strict=True)}
    return dict(rows=rows, inputs=inputs, outputs=outputs) | speeds


def measure_head(tokens: int, inputs: int, vocabulary: int, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    """Return the seconds per token of a head and its cross-entropy, forward and backward.

    Args:
        tokens, inputs, vocabulary: the head's shape.
        device: where it runs.
        dtype: dtype of hidden states and weight.
        repeats: timed runs.
    """
    hidden = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, inputs, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=device)

    def call() -> Any:
        return torch.autograd.grad(linear_cross_entropy(hidden, weight, labels)[0], (hidden, weight))

    return dict(inputs=inputs, outputs=vocabulary, s_per_token=seconds(call, device, repeats) / tokens)


def measure_others(device: torch.device, elements: int, weights: int, repeats: int) -> Row:
    """Return bytes/s of a bf16 addition, and the optimizer's seconds per weight, of a fused AdamW step over fp32."""
    a, b = (torch.randn(elements, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    speed = 3 * a.numel() * a.itemsize / seconds(lambda: torch.add(a, b, out=out), device, repeats)
    weight = torch.nn.Parameter(torch.randn(weights, device=device))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return dict(elementwise_bytes_per_s=speed, optimizer_s_per_weight=seconds(optimizer.step, device, repeats) / weights)


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call.

    Short calls are timed several at a time: a single one would include the latency of its launch, which a training step hides.
    """
    _seconds_each(call, device, 1)
    num_calls = max(1, round(LEAST_S / max(_seconds_each(call, device, 1), 1e-6)))
    return statistics.median(_seconds_each(call, device, num_calls) for _ in range(repeats))


def _seconds_each(call: Callable[[], Any], device: torch.device, num_calls: int) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / num_calls
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - started) / num_calls


def _warm_up(device: torch.device) -> None:
    """Multiply for WARM_UP_S: a GPU that has been idle runs at clocks that it does not keep in training."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:
        _seconds_each(lambda: a @ a, device, 20)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringspan bench matmul", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs a few small shapes, to try it out")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each call (default %(default)s)")
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=SAVE_HELP)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, print a line per shape, and write the result."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats={args.repeats}: it must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch sees no GPU here; --device=cpu tries it out")
    device, gpu = torch.device(args.device), args.device == "cuda"
    about = machine(device)
    try:
        path = result_path(args.json, args.save, f"matmul-{slug(about['device'])}")
    except ValueError as error:
        parser.error(str(error))
    dtype = torch.bfloat16 if gpu else torch.float32
    command = f"ringspan bench matmul --device {args.device} --repeats {args.repeats}"
    result: Row = dict(kind="matmul", **about, dtype="bf16" if gpu else "fp32", command=command)
    print(f"{about['device']}, {result['dtype']}; layers in TFLOP/s of forward, input gradient, weight gradient", flush=True)
    if gpu:
        _warm_up(device)
    result |= measure_others(device, ELEMENTS if gpu else 2**16, WEIGHTS if gpu else 2**16, args.repeats)
    print(
        f"elementwise {result['elementwise_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"optimizer {result['optimizer_s_per_weight'] * 1e12:.1f} ps per weight",
        flush=True,
    )
    heads: list[Row] = []
    for inputs, vocabulary in HEADS if gpu else ((64, 256), (64, 257)):
        tokens = HEAD_TOKENS if gpu else 128
        heads.append(measure_head(tokens, inputs, vocabulary, device, dtype, args.repeats))
        print(f"head {inputs:5} × {vocabulary:6}  {heads[-1]['s_per_token'] * 1e6:7.3g} µs per token with its loss", flush=True)
    rows: list[Row] = []
    for inputs, outputs in LAYERS if gpu else ((64, 128), (128, 64)):
        for count in ROWS if gpu else (128,):
            rows.append(measure_layer(count, inputs, outputs, device, dtype, args.repeats))
            text = "  ".join(f"{rows[-1][name]:7.3g}" for name in DIRECTIONS)
            print(f"{count:6} × {inputs:5} × {outputs:6}  {text}", flush=True)
    result |= dict(heads=heads, rows=rows)
    if path is not None:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"\nwritten: {path}; `make tables` gives it to the planner")
    return 0


if __name__ == "__main__":
    sys.exit(main())
