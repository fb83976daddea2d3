"""What `kernels.bench` compares by: the shapes, the truth that every kernel is judged by, and the rivals of
`kernels.attention`, each behind one call run(q, k, v, shape) -> out in (B, S, H, D).

A rival that is not installed raises ImportError, one that cannot do a shape ValueError: the benchmark notes why and goes
on. Nothing is imported before it is asked for, so listing the rivals costs nothing and needs none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .mask import Mask

CHUNK = 2**26  # scores the truth holds at once; about six such matrices are alive: 1.5 GiB, 3 in fp64
# Above this many bytes of scores a kernel that writes all of them is left out. On a GPU it may be an eighth of the memory, as a
# backward holds six such matrices.
DENSE_LIMIT = 2**30


@dataclass(frozen=True)
class Shape:
    """One attention problem; hashable, so that whatever a rival prepares for it is prepared once."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None  # as in Mask: counts the query itself
    documents: tuple[int, ...] | None = None  # lengths of the documents packed into each sequence

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.documents and sum(self.documents) != self.length:
            raise ValueError(f"{self.name}: documents hold {sum(self.documents)} tokens, length={self.length}: make them equal")

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head of one sequence. Plain causal counts as S²/2, as everyone counts it."""
        if self.causal and not self.window and not self.documents:
            return self.length**2 / 2
        total = 0
        for n in self.documents or (self.length,):
            w = min(self.window or n, n)
            back = w * (w + 1) // 2 + (n - w) * w  # keys at or before each query
            total += back if self.causal else 2 * back - n
        return total

    def flops(self) -> float:
        """Of the forward: two products. The backward has five, 2.5 times as much (what it recomputes is counted)."""
        return 4 * self.batch * self.heads * self.pairs() * self.head_dim

    def tiles(self, size: int = 128) -> int:
        """Tiles of size × size, from the first row and key on, that hold a visible pair; over all heads and sequences."""
        lo, hi = mask_of(self).interval(torch.arange(self.length), self.length)
        first = torch.stack([rows.min() // size for rows in lo.split(size)])
        last = torch.stack([rows.max() // size for rows in hi.split(size)])
        return self.batch * self.heads * int((last - first + 1).sum())

    def document_ids(self, device: torch.device) -> Tensor | None:
        """(S,) or None."""
        if not self.documents:
            return None
        return torch.repeat_interleave(torch.arange(len(self.documents)), torch.tensor(self.documents)).to(device)

    def sees(self, q_at: Tensor, k_at: Tensor, ids: Tensor | None) -> Tensor:
        """Whether queries at these positions see these keys. Written out, on purpose not through `Mask`: the truth that
        `Mask` is judged by, and FlexAttention's mask function."""
        seen = (q_at >= k_at) if self.causal else (q_at == q_at) & (k_at == k_at)
        if self.window:
            seen = seen & (q_at - k_at < self.window) & (k_at - q_at < self.window)
        return seen if ids is None else seen & (ids[q_at] == ids[k_at])

    def visible(self, rows: Tensor) -> Tensor:
        """bool (len(rows), S)."""
        keys = torch.arange(self.length, device=rows.device)
        return self.sees(rows[:, None], keys[None], self.document_ids(rows.device))

    def check_dense(self, device: torch.device) -> None:
        """For kernels that hold all scores at once."""
        size = 4 * self.batch * self.heads * self.length**2
        limit = torch.cuda.get_device_properties(device).total_memory // 8 if device.type == "cuda" else DENSE_LIMIT
        if size > limit:
            raise ValueError(f"would hold {size / 2**30:.0f} GiB of scores; here it is timed up to {limit / 2**30:.0f} GiB")


K = 2**10
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("d128-causal-16k", 1, 16 * K, 16, 16, 128),
        Shape("d128-full-16k", 1, 16 * K, 16, 16, 128, causal=False),
        Shape("d64-causal-16k", 1, 16 * K, 32, 32, 64),
        Shape("d128-causal-2k", 8, 2 * K, 16, 16, 128),
        Shape("d128-causal-512", 32, K // 2, 16, 16, 128),
        Shape("d128-causal-4k", 4, 4 * K, 16, 16, 128),
        Shape("d128-causal-8k", 2, 8 * K, 16, 16, 128),
        Shape("d256-causal-16k", 1, 16 * K, 8, 8, 256),
        Shape("d128-gqa4-causal-32k", 1, 32 * K, 16, 4, 128),
        Shape("d64-gqa4-causal-32k", 1, 32 * K, 32, 8, 64),
        Shape("d64-gqa4-causal-128k", 1, 128 * K, 32, 8, 64),
        Shape("d128-window4k-32k", 1, 32 * K, 16, 16, 128, window=4 * K),
        # Lengths as packing gives them: no multiples of any tile.
        Shape("d128-docs4k-32k", 1, 32 * K, 16, 16, 128, documents=(7001, 913, 4520, 2847, 9216, 1203, 3571, 3497)),
        Shape("d64-causal-1k", 1, K, 8, 8, 64),
        Shape("d64-gqa4-window256-1k", 1, K, 8, 2, 64, window=256),
        Shape("tiny", 2, 96, 4, 2, 32),
    )
}
DEFAULT_SHAPES = {
    "cuda": ["d128-causal-16k", "d128-full-16k", "d64-causal-16k", "d128-causal-2k"],
    "cpu": ["d64-causal-1k", "d64-gqa4-window256-1k"],
}


@lru_cache(maxsize=1)
def mask_of(shape: Shape) -> Mask:
    if shape.documents:
        return Mask.from_lengths(shape.documents, shape.causal, shape.window)
    return Mask(shape.causal, shape.window)


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
Run = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]


class Kernel(NamedTuple):
    label: str
    run: Run
    devices: tuple[str, ...]  # where it is measured unless asked for by name


def _sdpa(backend: SDPBackend) -> Run:
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


PEERS: dict[str, Kernel] = {
    "standard": Kernel("standard (eager torch)", _standard, ()),
    "sdpa-flash": Kernel("FlashAttention-2 (torch SDPA)", _sdpa(SDPBackend.FLASH_ATTENTION), ("cuda", "cpu")),
    "sdpa-cudnn": Kernel("cuDNN (torch SDPA)", _sdpa(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "sdpa-efficient": Kernel("memory-efficient (torch SDPA)", _sdpa(SDPBackend.EFFICIENT_ATTENTION), ()),
    "sdpa-math": Kernel("plain (torch SDPA)", _sdpa(SDPBackend.MATH), ("cpu",)),
    "flex": Kernel("FlexAttention (Triton)", _flex, ("cuda",)),
    "fa4": Kernel("FlashAttention-4 (CuTe)", _fa4, ("cuda",)),
}
