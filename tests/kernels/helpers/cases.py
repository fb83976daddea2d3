"""Inputs of tests: the sweep of cases that every backend passes, and random inputs of the block functions.

The sweep runs with these sizes on a CPU, and with larger ones too on a GPU.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringspan import Mask
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.tensors import accumulation_dtype
from tests.kernels.helpers.dense import Case


def packed(*lengths: int) -> tuple[int, ...]:
    """Return the ids of consecutive documents with these lengths; a negative length is padding."""
    return tuple(i if n > 0 else -1 for i, n in enumerate(lengths) for _ in range(abs(n)))


CASES = [
    Case("full"),
    Case("causal", causal=True, batch=2),
    Case("gqa", heads=(4, 2), causal=True),
    Case("mqa", heads=(3, 1)),
    Case("length-1", rows=1, causal=True),
    Case("length-33", rows=33, causal=True, heads=(4, 2)),
    Case("length-64", rows=64),
    Case("prime", rows=67, causal=True),
    Case("no-rows", rows=0, keys=5),
    Case("no-keys", rows=5, keys=0),
    Case("no-keys-sinks", rows=5, keys=0, sinks=True),
    Case("more-keys", rows=19, keys=70, causal=True),
    Case("one-query", rows=1, keys=65, heads=(4, 1), causal=True),
    Case("more-queries", rows=70, keys=19, causal=True),
    Case("more-queries-window", rows=70, keys=33, causal=True, window=9, sinks=True),
    Case("window", window=9),
    Case("window-1", window=1, causal=True),
    Case("window-causal", causal=True, window=20, heads=(4, 2)),
    Case("window-pair", window=(3, 17)),
    Case("window-pair-causal", window=(5, 2), causal=True),
    Case("window-wide", window=500),
    Case("documents", documents=packed(20, 13, 1, 36), causal=True),
    Case("documents-full", documents=packed(1, 1, 30, 38)),
    Case("documents-padded", documents=packed(-3, 20, -7, 25, -15), causal=True, sinks=True),
    Case("documents-batch", documents=(packed(70), packed(32, 32, -6)), batch=2, causal=True, window=11),
    Case("no-batch", batch=0, documents=packed(20, 50), causal=True),
    Case("documents-unordered", documents=(5,) * 20 + (2,) * 20 + (5,) * 30),
    Case("all-padding", documents=packed(-70), causal=True),
    Case("key-documents", documents=packed(20, 13, 1, 36), key_documents=packed(3, 40, 30, 7), keys=80),
    Case(
        "key-documents-causal",
        rows=45,
        keys=90,
        heads=(4, 2),
        causal=True,
        sinks=True,
        documents=(0,) * 9 + (2,) * 20 + (3,) * 1 + (5,) * 15,
        key_documents=(1,) * 30 + (2,) * 5 + (3,) * 45 + (5,) * 10,
    ),
    Case(
        "key-documents-window",
        rows=66,
        keys=34,
        batch=2,
        window=(5, 2),
        documents=(packed(-6, 30, 30), packed(16, 50)),
        key_documents=(packed(-4, 20, -3, -7), packed(20, 14)),
    ),
    Case("key-documents-dropout", keys=40, causal=True, dropout=0.3, documents=packed(70), key_documents=packed(40)),
    Case("prefix", causal=True, prefix=25),
    Case("prefix-0", causal=True, prefix=0),
    Case("prefix-long", causal=True, prefix=1000),
    Case("prefix-batch", causal=True, prefix=(5, 41), batch=2),
    Case("prefix-documents", causal=True, prefix=28, documents=packed(20, 18, -2, 30)),
    Case("prefix-more-queries", causal=True, prefix=7, rows=40, keys=20),
    Case("softcap", softcap=2.0, causal=True),
    Case("softcap-sinks", softcap=5.0, sinks=True, heads=(4, 2), window=12),
    Case("sinks", sinks=True, causal=True, heads=(4, 2), batch=2),
    Case("dropout", dropout=0.3, causal=True, heads=(4, 2), batch=2),
    Case("dropout-softcap", dropout=0.5, softcap=3.0, sinks=True, window=31),
    Case("dropout-more-keys", dropout=0.2, rows=20, keys=45, causal=True),
    Case("width-16", width=16, causal=True),
    Case("width-24", width=24, causal=True),
    Case("width-40", width=40, v_width=72, causal=True),
    Case("width-80", width=80, rows=40),
    Case("width-192-128", width=192, v_width=128, rows=40, causal=True),
    Case("width-256", width=256, rows=35, causal=True),
    Case("width-256-64", width=256, v_width=64, rows=40, causal=True),
    Case("width-64-256", width=64, v_width=256, rows=40, causal=True),
    Case("wider-values", width=16, v_width=64),
    Case("scale", scale=0.5, causal=True),
    Case("scale-negative", scale=-0.2, causal=True),
    Case("scale-zero", scale=0.0, causal=True, sinks=True),
    Case("transposed", layout="bhsd", causal=True, heads=(4, 2)),
    Case("strided", layout="strided", causal=True, width=24),
]

# Head dims of q and k, and of v, that kernels compute in two chunks or without all of their padding, with some of the masks.
CHUNKED = [
    *[(96, 96), (192, 128), (80, 80), (160, 160), (72, 136), (112, 112)],
    *[(192, 192), (64, 96), (128, 80), (104, 192), (80, 64), (64, 80)],
]
CHUNKED_CASES = [
    replace(case, name=f"{case}-{width}-{v_width}", width=width, v_width=v_width)
    for case, (width, v_width) in zip(
        [case for case in CASES if case.width == 32 and case.scale is None and not case.dropout], itertools.cycle(CHUNKED)
    )
]

LENGTH = 96
BACKENDS_AND_DTYPES = [
    ("reference", torch.float64),
    ("chunked", torch.float64),
    ("triton", torch.float32),
    pytest.param("hopper", torch.bfloat16, marks=pytest.mark.hopper),
]


def random_inputs(dtype: torch.dtype, device: str, length: int = LENGTH, heads: int = 4, width: int = 16) -> list[Tensor]:
    """q, k, v and dout, with two query heads per key head."""
    sizes = (heads, heads // 2, heads // 2, heads)
    return [torch.randn(2, length, h, width, dtype=dtype, device=device) for h in sizes]


def gradient_sums(*like: Tensor, begin: float = 0.0) -> list[Tensor]:
    """Tensors of these shapes in the accumulation dtype, filled with `begin`."""
    return [torch.full_like(x, begin, dtype=accumulation_dtype(x.dtype)) for x in like]


def two_blocks(head_dims: tuple[int, int], backend: str, device: str, rows: int = 200) -> list[Tensor]:
    """out, lse, dq, dk and dv of a softmax carried over two blocks of keys; two query heads per key head."""
    torch.manual_seed(0)
    border, mask = rows // 3, Mask(causal=True)
    sizes = (4, head_dims[0]), (2, head_dims[0]), (2, head_dims[1]), (4, head_dims[1])
    q, k, v, dout = (torch.randn(1, rows, *size, dtype=torch.bfloat16, device=device) for size in sizes)
    if backend == "reference":
        q, k, v, dout = (x.float() for x in (q, k, v, dout))
    carry = None
    for begin, end in ((0, border), (border, rows)):
        at = [(0, 1, rows)], [(begin, 1, end - begin)]
        carry = block_forward(q, k[:, begin:end], v[:, begin:end], mask, *at, carry, end == rows, backend=backend)
    out, lse = carry
    sums = [torch.zeros(x.shape, device=device) for x in (q, k, v)]
    delta = output_delta(dout, out)
    for begin, end in ((0, border), (border, rows)):
        at = [(0, 1, rows)], [(begin, 1, end - begin)]
        dk, dv = (x[:, begin:end] for x in sums[1:])
        block_backward(dout, q, k[:, begin:end], v[:, begin:end], lse, delta, mask, *at, sums[0], dk, dv, backend=backend)
    return [out, lse, *sums]
