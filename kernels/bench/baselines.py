"""What `kernels.bench` compares by: the shapes, the truth that every kernel is judged by, and the rivals of
`kernels.attention`, each behind one call run(q, k, v, shape) -> out in (B, S, H, D).

A rival that is not installed raises ImportError, one that cannot do a shape ValueError: the benchmark notes why and goes
on. Nothing is imported before it is asked for, so listing the rivals costs nothing and needs none of them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspan.kernels.bench.shapes import Shape

CHUNK = 2**26  # scores the truth holds at once; about six such matrices are alive: 1.5 GiB, 3 in fp64


def probes(shape: Shape) -> list[tuple[int, int]]:
    """(batch, KV head) pairs that are checked: the first, and the last, where an overflowing offset would show."""
    return sorted({(0, 0), (shape.batch - 1, shape.kv_heads - 1)})


def part(tensors: Sequence[Tensor], shape: Shape, batch: int, head: int) -> list[Tensor]:
    """One KV head of q, k, v and dout alike: (S, query heads per KV head or 1, D)."""
    groups = [x.shape[2] // shape.kv_heads for x in tensors]
    return [x[batch, :, head * g : (head + 1) * g] for x, g in zip(tensors, groups, strict=True)]


def truth(tensors: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """out, dq, dk, dv of one KV head by the definition, from its q, dout (S, G, D) and k, v (S, 1, D), some rows at a time."""
    wide = torch.float64 if tensors[0].dtype == torch.float32 else torch.float32
    q, k, v, dout = (x.to(wide) for x in tensors)
    k, v = k[:, 0], v[:, 0]
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
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


def errors(results: Sequence[Tensor], truths: list[list[Tensor]], shape: Shape) -> list[float]:
    """Relative RMS error of each result, over all probes."""
    gap, norm = [0.0] * len(results), [0.0] * len(results)
    for probe, expected in zip(probes(shape), truths, strict=True):
        for i, (x, ref) in enumerate(zip(part(results, shape, *probe), expected, strict=True)):
            gap[i] += (x.detach().to(ref.dtype) - ref).square().sum().item()
            norm[i] += ref.square().sum().item()
    return [(g / n) ** 0.5 for g, n in zip(gap, norm, strict=True)]


WAYS = ("forward", "backward")
AttentionFn = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]


class AttentionKernel(NamedTuple):
    label: str
    run: AttentionFn
    devices: tuple[str, ...]  # where it is measured unless asked for by name


def _sdpa(backend: SDPBackend) -> AttentionFn:
    def run(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        mask = None
        if backend is SDPBackend.MATH:
            shape.check_dense(q.device)
        if shape.window or shape.documents:
            if backend is not SDPBackend.MATH:  # it would need an (S, S) mask, which no one trains with at these lengths
                raise ValueError("takes no window and no documents")
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
    """The definition, an operation at a time: scores and weights are matrices in memory, of the inputs' dtype."""
    shape.check_dense(q.device)
    k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    hidden = ~shape.visible(torch.arange(shape.length, device=q.device))
    weights = (q * shape.head_dim**-0.5 @ k.mT).masked_fill_(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@lru_cache(maxsize=1)
def _flex_parts(shape: Shape, device: torch.device) -> tuple[Callable[..., Tensor], object]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # else backward cannot run twice on one graph, as timing it must
    torch._dynamo.reset()  # a ninth shape would otherwise run uncompiled, and only a warning would say so
    block_mask = None
    if shape.pairs() != shape.length**2:
        ids = shape.document_ids(device)
        # Uncompiled it holds (S, S) of everything.
        build = torch.compile(create_block_mask) if shape.length > 2**14 else create_block_mask
        block_mask = build(lambda b, h, q, k: shape.sees(q, k, ids), None, None, shape.length, shape.length, device=str(device))
    return torch.compile(flex_attention, dynamic=False), block_mask


def _flex(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    if q.device.type == "cpu":
        raise ValueError("FlexAttention has no backward on CPUs")
    flex, block_mask = _flex_parts(shape, q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex(q, k, v, block_mask=block_mask, enable_gqa=shape.heads != shape.kv_heads).transpose(1, 2)


@lru_cache(maxsize=1)
def _offsets(shape: Shape, device: torch.device) -> Tensor:
    """Where each document starts in the batch laid out as one row of tokens."""
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
    return out.view(q.shape)


PEERS: dict[str, AttentionKernel] = {
    "standard": AttentionKernel("standard (eager torch)", _standard, ()),
    "sdpa-flash": AttentionKernel("FlashAttention-2 (torch SDPA)", _sdpa(SDPBackend.FLASH_ATTENTION), ("cuda", "cpu")),
    "sdpa-cudnn": AttentionKernel("cuDNN (torch SDPA)", _sdpa(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "sdpa-efficient": AttentionKernel("memory-efficient (torch SDPA)", _sdpa(SDPBackend.EFFICIENT_ATTENTION), ()),
    "sdpa-math": AttentionKernel("plain (torch SDPA)", _sdpa(SDPBackend.MATH), ("cpu",)),
    "flex": AttentionKernel("FlexAttention (Triton)", _flex, ("cuda",)),
    "fa4": AttentionKernel("FlashAttention-4 (CuTe)", _fa4, ("cuda",)),
}
