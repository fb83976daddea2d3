"""Baselines of `ringspan bench kernels`, and the reference results that every kernel is checked against.

A baseline is another implementation of attention behind one call: run(q, k, v, shape) -> out, all (B, S, H, D). It raises
ImportError if its package is not installed and ValueError if it does not support a shape; the benchmark notes the reason and
continues. Packages are imported on the first call, so listing the baselines needs none of them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspan.kernels.bench.shapes import Shape

CHUNK = 2**26  # scores that the reference holds at once; about six such matrices are alive: 1.5 GiB, 3 in fp64


def probes(shape: Shape) -> list[tuple[int, int]]:
    """Return the (batch, KV head) pairs to check: the first, and the last, where an overflowing offset would show."""
    return sorted({(0, 0), (shape.batch - 1, shape.kv_heads - 1)})


def head_slice(tensors: Sequence[Tensor], shape: Shape, batch: int, head: int) -> list[Tensor]:
    """Return one KV head of each tensor, with its query heads: (S, query heads per KV head or 1, D)."""
    groups = [x.shape[2] // shape.kv_heads for x in tensors]
    return [x[batch, :, head * g : (head + 1) * g] for x, g in zip(tensors, groups, strict=True)]


def reference_results(tensors: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """Compute out, dq, dk and dv of one KV head by the definition, in fp32 (fp64 for fp32 inputs), in chunks of rows.

    Args:
        tensors: q (S, G, D), k (S, 1, D), v (S, 1, D) and dout (S, G, D), with G query heads per KV head.
        shape: supplies the mask and the scale.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float32 else torch.float32
    q, k, v, dout = (x.to(wide) for x in tensors)
    k, v = k[:, 0], v[:, 0]
    out, dq, dk, dv = (torch.zeros_like(x) for x in (dout, q, k, v))
    length, scale = shape.length, shape.head_dim**-0.5
    for start in range(0, length, step := max(1, CHUNK // (length * q.shape[1]))):
        rows = torch.arange(start, min(start + step, length), device=q.device)
        s = torch.einsum("qgd,kd->qgk", q[rows], k) * scale
        p = s.masked_fill_(~shape.visible(rows)[:, None], -torch.inf).softmax(-1)
        out[rows] = torch.einsum("qgk,kd->qgd", p, v)
        dp = torch.einsum("qgd,kd->qgk", dout[rows], v)
        ds = p * (dp - (dout[rows] * out[rows]).sum(-1, keepdim=True)) * scale
        dq[rows] = torch.einsum("qgk,kd->qgd", ds, k)
        dk += torch.einsum("qgk,qgd->kd", ds, q[rows])
        dv += torch.einsum("qgk,qgd->kd", p, dout[rows])
    return [out, dq, dk[:, None], dv[:, None]]


def errors(results: Sequence[Tensor], references: list[list[Tensor]], shape: Shape) -> list[float]:
    """Return the relative RMS error of each result, over all probes."""
    gap, norm = [0.0] * len(results), [0.0] * len(results)
    for probe, expected in zip(probes(shape), references, strict=True):
        for i, (x, ref) in enumerate(zip(head_slice(results, shape, *probe), expected, strict=True)):
            gap[i] += (x.detach().to(ref.dtype) - ref).square().sum().item()
            norm[i] += ref.square().sum().item()
    return [(g / n) ** 0.5 for g, n in zip(gap, norm, strict=True)]


DIRECTIONS = ("forward", "backward")
AttentionFn = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]


class AttentionKernel(NamedTuple):
    """One implementation of attention: its name in tables, its call, and the device types that measure it by default."""

    label: str
    run: AttentionFn
    devices: tuple[str, ...]


def _sdpa(backend: SDPBackend) -> AttentionFn:
    def run(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        mask = None
        if backend is SDPBackend.MATH:
            shape.check_dense(q.device)
        if shape.window or shape.documents:
            if backend is not SDPBackend.MATH:  # it would need an (S, S) mask, which is not practical at these lengths
                raise ValueError("supports neither windows nor documents")
            mask = shape.visible(torch.arange(shape.length, device=q.device))
        causal, gqa = shape.causal and mask is None, shape.heads != shape.kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=gqa)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise ValueError("torch has no such kernel for this device, dtype and shape") from None
            raise
        return out.transpose(1, 2)

    return run


def _standard(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Attention in eager torch: scores and weights are matrices in memory, in the inputs' dtype."""
    shape.check_dense(q.device)
    k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    hidden = ~shape.visible(torch.arange(shape.length, device=q.device))
    weights = (q * shape.head_dim**-0.5 @ k.mT).masked_fill_(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@lru_cache(maxsize=1)
def _flex_parts(shape: Shape, device: torch.device) -> tuple[Callable[..., Tensor], object]:
    """Compiled FlexAttention and its block mask."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # otherwise a second backward on one graph fails, and timing needs it
    torch._dynamo.reset()  # otherwise a ninth shape exceeds the recompile limit and runs eagerly, with only a warning
    block_mask = None
    if shape.pairs() != shape.length**2:
        ids = shape.document_ids(device)
        # In eager mode it holds (S, S) intermediates.
        build = torch.compile(create_block_mask) if shape.length > 2**14 else create_block_mask
        visible = lambda b, h, q, k: shape.is_visible(q, k, ids)  # noqa: E731
        block_mask = build(visible, None, None, shape.length, shape.length, device=str(device))
    return torch.compile(flex_attention, dynamic=False), block_mask


def _flex(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    if q.device.type == "cpu":
        raise ValueError("FlexAttention has no backward on CPUs")
    flex, block_mask = _flex_parts(shape, q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex(q, k, v, block_mask=block_mask, enable_gqa=shape.heads != shape.kv_heads).transpose(1, 2)


@lru_cache(maxsize=1)
def _offsets(shape: Shape, device: torch.device) -> Tensor:
    """cu_seqlens: the start of each document in the batch, laid out as one row of tokens."""
    lengths = torch.tensor((0, *(shape.documents or ()) * shape.batch))
    return lengths.cumsum(0).to(device, torch.int32)


def _fa4(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    reach = None if shape.window is None else shape.window - 1
    window = (reach, 0 if shape.causal else reach) if shape.window else (None, None)
    causal = shape.causal and not shape.window
    if not shape.documents:
        out = flash_attn_func(q, k, v, causal=causal, window_size=window)
    else:
        offsets, longest = _offsets(shape, q.device), max(shape.documents)
        out = flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
            window_size=window,
        )
    out = out[0] if isinstance(out, tuple) else out
    return out.view(*q.shape[:3], v.shape[-1])


def _fa3(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    from flash_attn_interface import flash_attn_func

    if shape.documents:
        raise ValueError("documents are measured with fa4 only")
    reach = -1 if shape.window is None else shape.window - 1
    out = flash_attn_func(q, k, v, causal=shape.causal, window_size=(reach, 0 if shape.causal else reach))
    return out[0] if isinstance(out, tuple) else out


BASELINES: dict[str, AttentionKernel] = {
    "standard": AttentionKernel("standard (eager torch)", _standard, ()),
    "sdpa-flash": AttentionKernel("FlashAttention-2 (torch SDPA)", _sdpa(SDPBackend.FLASH_ATTENTION), ("cuda", "cpu")),
    "sdpa-cudnn": AttentionKernel("cuDNN (torch SDPA)", _sdpa(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "sdpa-efficient": AttentionKernel("memory-efficient (torch SDPA)", _sdpa(SDPBackend.EFFICIENT_ATTENTION), ()),
    "sdpa-math": AttentionKernel("plain (torch SDPA)", _sdpa(SDPBackend.MATH), ("cpu",)),
    "flex": AttentionKernel("FlexAttention (Triton)", _flex, ("cuda",)),
    "fa3": AttentionKernel("FlashAttention-3", _fa3, ("cuda",)),
    "fa4": AttentionKernel("FlashAttention-4 (CuTe)", _fa4, ("cuda",)),
}
