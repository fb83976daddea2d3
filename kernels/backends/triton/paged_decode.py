"""Flash-Decoding in portable Triton: a program has one KV head of one sequence, and some of its pages.

The queries that share a KV head are the rows of a tile, so that keys are loaded once for all of them. There are at least 16
rows, as a product on tensor cores has; it is memory that such a kernel waits for. Pages are looked up one at a time.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.triton.common import LN2, exponents
from ringspan.kernels.runtime.launch import Arguments, Launch


@triton.jit(do_not_specialize=("kv_heads", "group", "splits", "window", "table_stride"))
def paged_forward(
    q, keys, values, table, lengths, out, lse,
    q_strides, k_strides, v_strides, table_stride, out_strides, lse_strides,
    kv_heads, group, window, scale, softcap, splits,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    sequence, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    b, head = (sequence // kv_heads).to(tl.int64), (sequence % kv_heads).to(tl.int64)
    length = tl.load(lengths + b)
    first = tl.maximum(0, length - window)
    # its share of the pages with something in sight
    seen_from = first // PAGE
    share = tl.cdiv(tl.cdiv(length, PAGE) - seen_from, splits)
    begin = seen_from + split * share
    end = tl.minimum(begin + share, tl.cdiv(length, PAGE))

    row = tl.arange(0, GROUP)
    wide, v_wide = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    heads = head * group + row
    queries = q + b * q_strides[0] + heads[:, None] * q_strides[1] + wide[None, :] * q_strides[2]
    q_tile = tl.load(queries, mask=(row < group)[:, None] & (wide < D)[None, :], other=0.0)
    keys += head * k_strides[2]
    values += head * v_strides[2]

    m = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK_DV], tl.float32)
    for page in range(begin, end):
        number = tl.load(table + b * table_stride + page).to(tl.int64)
        slot = tl.arange(0, PAGE)
        at = page * PAGE + slot
        seen = (at >= first) & (at < length)
        k_at = number * k_strides[0] + slot[:, None] * k_strides[1] + wide[None, :] * k_strides[3]
        k_tile = tl.load(keys + k_at, mask=seen[:, None] & (wide < D)[None, :], other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        s, factor = exponents(s, scale, softcap, True)
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)  # each page of its share holds something that is seen
        p = tl.exp2(s * factor - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, 1)
        v_at = number * v_strides[0] + slot[:, None] * v_strides[1] + v_wide[None, :] * v_strides[3]
        v_tile = tl.load(values + v_at, mask=seen[:, None] & (v_wide < DV)[None, :], other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
        m = m_new

    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    stats = tl.where(empty, float("-inf"), m * LN2 + tl.log(tl.where(empty, 1.0, total)))
    place = b * out_strides[0] + split * out_strides[1] + heads[:, None] * out_strides[2] + v_wide[None, :]
    tl.store(out + place, acc, mask=(row < group)[:, None] & (v_wide < DV)[None, :])
    tl.store(lse + b * lse_strides[0] + split * lse_strides[1] + heads, stats, mask=row < group)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> Launch:
    """Into out (B, splits, Hq, Dv) and lse (B, splits, Hq), in fp32."""
    tensors = dict(q=q, keys=keys, values=values, table=table, lengths=lengths, out=out, lse=lse)
    return Launch(paged_forward, _arguments, tensors, dict(window=window, scale=scale, softcap=softcap or None))


def _arguments(**given: Any) -> Arguments:
    q, values, out = given["q"], given["values"], given["out"]
    (batch, heads, width), (_, page, kv_heads, v_width), splits = q.shape, values.shape, out.shape[1]
    names = dict(q="q", k="keys", v="values", out="out", lse="lse")
    given |= {f"{name}_strides": given[tensor].stride() for name, tensor in names.items()}
    given |= dict(table_stride=given["table"].stride(0), kv_heads=kv_heads, group=heads // kv_heads, splits=splits)
    given |= dict(D=width, DV=v_width, BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=triton.next_power_of_2(v_width))
    given |= dict(GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), PAGE=page, num_warps=4)
    return batch * kv_heads * splits, given
