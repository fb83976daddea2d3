"""Benchmark of ringspan.compat.ring_flash_attn next to ring-flash-attn's algorithm, over the same kernel and over torch's.

    torchrun --nproc-per-node=2 -m ringspan.compat.bench --tokens 8k 32k --heads 16/16 --json rings.json

ring-flash-attn's zigzag ring launches one kernel per hop, which rounds its result to the input dtype, and merges results and
gradients by PyTorch in fp32. The baseline does so with Ringspan's kernels and with torch's FlashAttention-2, so the first row
shows the algorithm's cost alone. Options, table and error against fp32 are those of `ringspan.parallel.bench`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.compat.ring_flash_attn import zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_varlen_func
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.mask import Mask
from ringspan.parallel.bench.__main__ import main
from ringspan.parallel.bench.baselines import BenchContext, Candidate, Make, Problem, Setting, candidates
from ringspan.parallel.layout import Layout

Block = tuple[Tensor, Tensor]


class OwnKernel:
    """Ringspan's kernels, called for one block: out in the input dtype, and lse (B, H, S)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
        return block_forward(q, k, v, Mask(causal))

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> list[Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        mask = Mask(causal)
        delta = output_delta(dout, out, mask=mask)
        block_backward(dout, q, k, v, lse, delta, mask, None, None, dq, dk, dv, accumulate=False)
        return [dq, dk, dv]


class TorchKernel:
    """torch's FlashAttention-2, as ring-flash-attn calls flash_attn's."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
        lengths = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False)
        return out, lse

    @staticmethod
    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> list[Tensor]:
        lengths = None, None, q.shape[1], k.shape[1]
        seed, offset = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in (2, ()))
        return list(torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset))


class Hop(NamedTuple):
    """One rank's work in one hop of a zigzag ring: rows of its queries, and rows of the keys that have arrived."""

    rows: slice
    keys: slice
    causal: bool


def hops(rank: int, ranks: int, length: int) -> list[Hop]:
    """Return the hops of a rank: the local block, blocks of earlier ranks (their first halves), blocks of later ranks."""
    whole, half = slice(0, length), length // 2
    first, second = slice(0, half), slice(half, length)
    earlier, later = Hop(whole, first, False), Hop(second, whole, False)
    return [Hop(whole, whole, True)] + [earlier if step <= rank else later for step in range(1, ranks)]


class MergedRing(torch.autograd.Function):
    """Zigzag ring with a kernel per hop, whose results PyTorch merges in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Any, group: dist.ProcessGroup) -> Tensor:
        ctx.kernel, ctx.group = kernel, group
        out, lse = torch.zeros_like(q, dtype=torch.float32), None
        own = k, v = k.contiguous(), v.contiguous()
        plan = hops(group.rank(), group.size(), q.shape[1])
        for step, (rows, keys, causal) in enumerate(plan):
            following, requests = _pass_on((k, v), group) if step + 1 < len(plan) else ((k, v), [])
            part, part_lse = kernel.forward(q[:, rows].contiguous(), k[:, keys].contiguous(), v[:, keys].contiguous(), causal)
            if lse is None:
                out, lse = part.float(), part_lse.clone()
            else:
                joint = torch.logaddexp(lse[:, :, rows], part_lse)
                old, new = (torch.exp(x - joint).transpose(1, 2)[..., None] for x in (lse[:, :, rows], part_lse))
                out[:, rows] = old * out[:, rows] + new * part.float()
                lse[:, :, rows] = joint
            for request in requests:
                request.wait()
            k, v = following
        ctx.save_for_backward(q, *own, out := out.to(q.dtype), lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        dq = torch.zeros_like(q, dtype=torch.float32)
        grads = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        plan = hops(group.rank(), group.size(), q.shape[1])
        arriving: list[Any] = []
        for step, (rows, keys, causal) in enumerate(plan):
            following, requests = _pass_on((k, v), group) if step + 1 < len(plan) else ((k, v), [])
            block = (x[:, rows].contiguous() for x in (dout, q))
            blocks = *block, k[:, keys].contiguous(), v[:, keys].contiguous(), out[:, rows].contiguous()
            part_q, part_k, part_v = ctx.kernel.backward(*blocks, lse[:, :, rows].contiguous(), causal)
            dq[:, rows] += part_q
            for request in arriving:
                request.wait()
            grads[0][:, keys] += part_k
            grads[1][:, keys] += part_v
            for request in requests:
                request.wait()
            k, v = following
            grads, arriving = _pass_on(grads, group)  # the gradients of a block follow it, and return to its owner at the end
        for request in arriving:
            request.wait()
        return dq.to(q.dtype), grads[0].to(q.dtype), grads[1].to(q.dtype), None, None


def _pass_on(tensors: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> tuple[tuple[Tensor, Tensor], list[Any]]:
    """Send tensors to the next rank; return what the previous rank sends, and the requests to wait for."""
    ranks = dist.get_process_group_ranks(group)
    at, size = group.rank(), group.size()
    received = torch.empty_like(tensors[0]), torch.empty_like(tensors[1])
    operations = []
    for x, y in zip(tensors, received, strict=True):
        operations.append(dist.P2POp(dist.isend, x, ranks[(at + 1) % size], group))
        operations.append(dist.P2POp(dist.irecv, y, ranks[(at - 1) % size], group))
    return received, dist.batch_isend_irecv(operations)


def _zigzag(call: Any) -> Make:
    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        shapes = setting.tensor_shapes(setting.tokens)
        q, k, v, dout = (torch.randn(shape, device=context.device, dtype=context.dtype) for shape in shapes)
        leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        flops = setting.global_shape(context.ranks).flops() / context.ranks
        layout = Layout("zigzag", setting.tokens * context.ranks, context.ranks)
        yield Problem(lambda: call(*leaves, context.ring.ring_group), leaves, dout, flops, layout)

    return make


def _varlen(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    cu_seqlens: Any = [0, q.shape[1]]
    return zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, q.shape[1], causal=True, group=group)[None]


def table() -> dict[str, Candidate]:
    """Return the candidates by name, the first of which is one rank alone."""
    both, gpus = ("cuda", "cpu"), ("cuda",)
    zigzag = _zigzag(lambda q, k, v, group: zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group))
    own = _zigzag(lambda q, k, v, group: MergedRing.apply(q, k, v, OwnKernel, group))
    flash = _zigzag(lambda q, k, v, group: MergedRing.apply(q, k, v, TorchKernel, group))
    return {
        "alone": candidates()["alone"],
        "ring-zigzag-compat": Candidate("zigzag_ring_flash_attn_func of ringspan.compat", zigzag, True, both),
        "ring-zigzag-compat-varlen": Candidate("…_varlen_func of ringspan.compat, one document", _zigzag(_varlen), True, both),
        "ring-zigzag-merged": Candidate("ring-flash-attn's algorithm, Ringspan's kernels", own, False, both),
        "ring-zigzag-merged-flash": Candidate("ring-flash-attn's algorithm, torch's FlashAttention-2", flash, False, gpus),
    }


if __name__ == "__main__":
    sys.exit(main(table=table()))
