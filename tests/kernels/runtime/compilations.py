"""Count the kernels that Triton compiles for calls that differ in lengths, batch sizes and documents only. Needs no GPU.

python -m tests.kernels.runtime.compilations             prints JSON, {variant: {kernel: count}}

A process of its own, because the interpreter of tests compiles nothing. Calls run on meta tensors, and Triton's compiler is
replaced: it is called once for each key of Triton's cache, which this module counts.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ringspan import Mask
from ringspan.kernels.attention import sink_carry
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime.warmup import AttentionCall, Job, run_on_meta
from ringspan.kernels.segments import Segment

Case = tuple[int, int, int]  # batch, queries, keys
CASES: list[Case] = [
    (batch, rows, rows + more)
    for batch, rows, more in (
        *((1, rows, 0) for rows in (1, 2, 15, 16, 17, 64, 127, 128, 129, 512, 1000, 4096, 5001, 16384)),
        *((batch, 4096, 0) for batch in (2, 3, 16)),
        *((3, rows, 0) for rows in (1, 16, 77, 2048)),
        *((2, rows, more) for rows, more in ((1, 1), (1, 16), (1, 4095), (100, 1), (128, 128), (333, 4763))),
        *((batch, rows, 0) for batch, rows in ((1, 65536), (2, 2**20), (1, 2**20 + 1))),
    )
]
CAUSAL = Mask(causal=True)
VARIANTS: dict[str, dict[str, Any]] = {  # options of a call; the default is causal, bf16, 32 heads of 128
    "causal": {},
    "gqa-6": dict(heads=12, kv_heads=2),
    "gqa": dict(kv_heads=4),
    "unmasked": dict(mask=Mask()),
    "window": dict(mask=Mask(causal=True, window=1024)),
    "window-two-sided": dict(mask=Mask(window=(1, 16))),
    "documents": dict(documents=True),
    "softcap": dict(softcap=20.0),
    "carry": dict(carry=True),
    "sinks": dict(sinks=True),
    "deterministic": dict(deterministic=True),
    "head-dim-40": dict(heads=3, kv_heads=1, width=40),
    "head-dim-96": dict(width=96),
    "mla": dict(width=192, v_width=128),
    "heads-first": dict(heads_first=True, width=72),
    "zigzag": dict(ranks=4),
    "striped": dict(ranks=3, step=3),
    "portable": dict(backend="triton"),
    "dropout": dict(dropout=0.1, seed=1),
    "fp32": dict(dtype=torch.float32),
}

CALL = AttentionCall(8, 8, 128, 128)
WARMUPS = {  # calls of `ringspan warmup` whose kernels a variant compiles, and one whose kernels none does
    "causal": CALL,
    "gqa-6": AttentionCall(12, 2, 128, 128),
    "gqa": AttentionCall(32, 4, 128, 128),
    "window": replace(CALL, window=True),
    "documents": replace(CALL, documents=True),
    "softcap": replace(CALL, softcap=True),
    "sinks": replace(CALL, sinks=True),
    "deterministic": replace(CALL, deterministic=True),
    "mla": AttentionCall(8, 8, 192, 128),
    "portable": replace(CALL, backend="triton"),
    "dropout": replace(CALL, dropout=True),
    "fp32": replace(CALL, dtype="fp32"),
    "new": AttentionCall(8, 8, 64, 64),
}


def run_case(
    case: Case, device: str, *, mask: Mask = CAUSAL, heads: int = 32, kv_heads: int | None = None, width: int = 128,
    v_width: int | None = None, dtype: torch.dtype = torch.bfloat16, documents: bool = False, carry: bool = False,
    sinks: bool = False, heads_first: bool = False, ranks: int = 0, step: int = 1, **options: Any,
) -> None:  # fmt: skip
    """Run forward, delta and backward of one case."""
    batch, rows, keys = case
    if documents or ranks:
        keys = rows
    if (ranks or sinks) and rows < 2:  # a shard of one row has one segment, a sink of one row stride 1
        return

    def empty(length: int, num_heads: int, columns: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        size = (batch, num_heads, length, columns) if heads_first else (batch, length, num_heads, columns)
        x = torch.zeros(size, dtype=dtype, device=device)
        return x.transpose(1, 2) if heads_first else x

    kv_heads, v_width = kv_heads or heads, v_width or width
    q, k, v = empty(rows, heads, width), empty(keys, kv_heads, width), empty(keys, kv_heads, v_width)
    if documents:
        mask = Mask(causal=True, documents=torch.arange(rows, device=device) // 100)
    at: tuple[list[Segment] | None, list[Segment] | None] = (None, None)
    if ranks and step == 1:
        half = (rows // 2, rows - rows // 2)
        at = [(half[0], 1, half[0]), (5 * rows, 1, half[1])], [(0, 1, half[0]), (7 * rows, 1, half[1])]
    elif ranks:
        at = [(1, step, rows)], [(2, step, rows)]
    first: Any = (empty(rows, heads, v_width, torch.float32), torch.zeros(batch, heads, rows, device=device)) if carry else None
    first = sink_carry(torch.zeros(heads, device=device), q) if sinks else first
    out, lse = block_forward(q, k, v, mask, *at, carry=first, **options)
    delta = output_delta(out, out)
    gradients = (torch.empty_like(x) for x in (q, k, v))
    block_backward(out, q, k, v, lse, delta, mask, *at, *gradients, accumulate=False, **options)


def count() -> Iterator[tuple[str, Counter[str]]]:
    """Yield each variant and the number of compilations of each kernel."""
    from triton.runtime.jit import JITFunction

    from ringspan.kernels.runtime.ahead_of_time import select_target

    os.environ["RINGSPAN_CHIP"] = "sm_90"
    select_target("sm_90")
    compiled: set[tuple[str, str]] = set()
    earlier: set[tuple[str, str]] = set()

    def new_kernels() -> Counter[str]:
        """Return the compilations since the last call, of kernels that no earlier call compiled."""
        names = Counter(kernel for kernel, _ in compiled - earlier)
        earlier.update(compiled)
        return names

    def compile_nothing(self: Any, key: str, *rest: Any, **options: Any) -> object:
        compiled.add((self.fn.__name__, key))
        return object()

    JITFunction._do_compile = compile_nothing
    for name, options in VARIANTS.items():
        for case in CASES:
            run_case(case, "meta", **options)
        yield name, new_kernels()
    # A warmup needs no kernel that these calls have not compiled, and compiles those of other options.
    for name, call in WARMUPS.items():
        for direction in ("forward", "backward"):
            run_on_meta(Job(call, direction))
        yield f"warmup {name}", new_kernels()


if __name__ == "__main__":
    print(json.dumps(dict(count())))
