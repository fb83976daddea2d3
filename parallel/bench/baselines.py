"""What `parallel.bench` compares: our ring in every layout and over every transport, and other ways to span ranks.

A contestant prepares a problem, this rank's share of one sequence with fresh random tensors, and cleans up after itself.
One that is not installed raises ImportError, one that cannot do a setting ValueError.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspan.kernels.attention import attention
from ringspan.kernels.bench.baselines import PEERS as KERNELS
from ringspan.kernels.bench.shapes import Shape
from ringspan.kernels.mask import Mask
from ringspan.parallel.context_attention import context_attention
from ringspan.parallel.layout import KINDS
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.transport.select import COPIED, TRANSPORTS
from ringspan.parallel.ulysses import check_heads, repeat_heads, to_heads, to_tokens


@dataclass(frozen=True)
class Setting:
    """One sequence over all ranks, causal."""

    tokens: int  # per rank
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def name(self) -> str:
        k = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        window = f"-window{self.window}" if self.window else ""
        return f"{k}-h{self.heads}-{self.kv_heads}-d{self.head_dim}{window}"

    def shape(self, length: int) -> Shape:
        return Shape(self.name, 1, length, self.heads, self.kv_heads, self.head_dim, window=self.window)

    def whole(self, ranks: int) -> Shape:
        return self.shape(self.tokens * ranks)

    def alone(self, ranks: int) -> Shape:
        """What one rank computes without the others that costs as much: causal work grows with the square of the length."""
        if self.window:
            return self.shape(self.tokens)
        length = int(self.tokens * ranks**0.5)
        return self.shape(length // 128 * 128 or length)

    def mask(self) -> Mask:
        return Mask(causal=True, window=self.window)


class Problem(NamedTuple):
    run: Callable[[], Any]  # out
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    flops: float  # of this rank's forward


def forward_and_backward(problem: Problem) -> None:
    """In one thread: autograd's own would be woken in each call, which a training step does once, and the host would be late
    for kernels of short shards."""
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(problem.run(), problem.leaves, problem.dout)


class BenchContext(NamedTuple):
    """Where a benchmark runs. Meshes are made once: groups are collectives and cost memory."""

    device: torch.device
    dtype: torch.dtype
    ranks: int
    ring: Mesh
    ulysses: Mesh
    backend: str


Make = Callable[[Setting, BenchContext], AbstractContextManager[Problem]]


class Contestant(NamedTuple):
    label: str
    make: Make
    ours: bool
    devices: tuple[str, ...]


def _tensors(setting: Setting, place: BenchContext, length: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    heads = setting.heads, setting.kv_heads, setting.kv_heads, setting.heads
    sizes = [(1, length, n, setting.head_dim) for n in heads]
    q, k, v, dout = (torch.randn(size, device=place.device, dtype=place.dtype) for size in sizes)
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout


@contextmanager
def _alone(setting: Setting, place: BenchContext) -> Iterator[Problem]:
    shape = setting.alone(place.ranks)
    leaves, dout = _tensors(setting, place, shape.length)
    mask = setting.mask()
    yield Problem(lambda: attention(*leaves, mask, backend=place.backend), leaves, dout, shape.flops())


def _ring(kind: str, transport: str) -> Make:
    @contextmanager
    def make(setting: Setting, place: BenchContext) -> Iterator[Problem]:
        whole = setting.whole(place.ranks)
        layout = place.ring.layout(kind, whole.length)
        leaves, dout = _tensors(setting, place, layout.local_length)
        options: dict[str, Any] = dict(layout=layout, mesh=place.ring, transport=transport, backend=place.backend)
        mask = setting.mask()
        run = lambda: context_attention(*leaves, mask, **options)  # noqa: E731
        yield Problem(run, leaves, dout, whole.flops() / place.ranks)

    return make


@contextmanager
def _ulysses(setting: Setting, place: BenchContext) -> Iterator[Problem]:
    whole = setting.whole(place.ranks)
    layout = place.ulysses.layout("contiguous", whole.length)
    leaves, dout = _tensors(setting, place, layout.local_length)
    options: dict[str, Any] = dict(layout=layout, mesh=place.ulysses, backend=place.backend)
    mask = setting.mask()
    run = lambda: context_attention(*leaves, mask, **options)  # noqa: E731
    yield Problem(run, leaves, dout, whole.flops() / place.ranks)


def _ulysses_over(kernel: str) -> Make:
    """The same exchange around somebody else's kernel."""

    @contextmanager
    def make(setting: Setting, place: BenchContext) -> Iterator[Problem]:
        whole, ranks = setting.whole(place.ranks), place.ranks
        check_heads(setting.heads, ranks, ranks)
        leaves, dout = _tensors(setting, place, setting.tokens)
        kv_heads = repeat_heads(leaves[1], ranks).shape[2] // ranks
        local = Shape(whole.name, 1, whole.length, setting.heads // ranks, kv_heads, setting.head_dim, window=setting.window)
        group, among = place.ulysses.ulysses_group, place.ulysses.context_group
        assert group is not None and among is not None
        trip = ranks, group.group_name, among.group_name

        def run() -> Tensor:
            q, k, v = leaves
            here = to_heads(q, *trip), to_heads(k, *trip), to_heads(v, *trip)
            return to_tokens(KERNELS[kernel].run(*here, local), *trip)

        yield Problem(run, leaves, dout, whole.flops() / ranks)

    return make


@cache
def _device_mesh(device: str, ranks: int) -> DeviceMesh:
    return init_device_mesh(device, (ranks,), mesh_dim_names=("context",))


def _torch_context_parallel(rotate: str) -> Make:
    @contextmanager
    def make(setting: Setting, place: BenchContext) -> Iterator[Problem]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if setting.window or setting.heads != setting.kv_heads:
            raise ValueError("takes neither windows nor fewer KV heads")
        whole = setting.whole(place.ranks)
        set_rotate_method(rotate)
        size = (1, setting.heads, whole.length, setting.head_dim)
        q, k, v = (torch.randn(size, device=place.device, dtype=place.dtype) for _ in range(3))
        with context_parallel(
            _device_mesh(place.device.type, place.ranks),
            buffers=[q, k, v],
            buffer_seq_dims=[2, 2, 2],
            no_restore_buffers={q, k, v},
        ):
            leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

            def run() -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(*leaves, is_causal=True)

            yield Problem(run, leaves, torch.randn_like(q), whole.flops() / place.ranks)

    return make


def contestants() -> dict[str, Contestant]:
    """By name; "alone" first, which the others are a share of."""
    anywhere, gpus = ("cuda", "cpu"), ("cuda",)
    table: dict[str, Contestant] = {"alone": Contestant("one rank alone", _alone, True, anywhere)}
    for kind in KINDS:
        for transport in TRANSPORTS:
            where: tuple[str, ...] = () if transport == "auto" else gpus if transport in COPIED else anywhere
            label = f"Ringspan ring, {kind}, {transport}"
            table[f"ring-{kind}-{transport}"] = Contestant(label, _ring(kind, transport), True, where)
    table["ulysses"] = Contestant("Ringspan Ulysses", _ulysses, True, anywhere)
    for kernel in ("sdpa-cudnn", "fa4", "sdpa-flash"):
        label, _, where = KERNELS[kernel]
        table[f"ulysses-{kernel}"] = Contestant(
            f"Ulysses over {label}", _ulysses_over(kernel), False, gpus if kernel != "sdpa-flash" else ("cpu",)
        )
    for rotate in ("allgather", "alltoall"):
        label = f"torch context_parallel, cuDNN, {rotate}"
        table[f"torch-cp-{rotate}"] = Contestant(label, _torch_context_parallel(rotate), False, gpus)
    return table


def sampled_error(problem: Problem, setting: Setting, place: BenchContext, kind: str, rows: int = 32) -> float:
    """Relative RMS error of the ring's out in the first and last KV head, at some rows of every rank, against fp32."""
    layout = place.ring.layout(kind, setting.tokens * place.ranks)
    q, k, v = (x.detach() for x in problem.leaves)
    out = problem.run().detach()
    at = layout.positions(place.ring.context_rank, place.device)
    real = (at < layout.length).nonzero()[:, 0]
    chosen = real[torch.linspace(0, len(real) - 1, rows, device=place.device).long()] if len(real) else real
    visible = setting.mask().visible(at[chosen], torch.arange(layout.length, device=place.device))[0]
    gap = norm = torch.zeros((), device=place.device)
    group = setting.heads // setting.kv_heads
    for head in {0, setting.kv_heads - 1}:
        everywhere = []
        for x in (k, v):
            mine = x[0, :, head].contiguous()
            shards = [torch.empty_like(mine) for _ in range(place.ranks)]
            dist.all_gather(shards, mine, group=place.ring.context_group)
            everywhere.append(layout.unshard(shards, 0).float())
        queries = slice(head * group, (head + 1) * group)
        s = torch.einsum("ihd,jd->hij", q[0, chosen, queries].float(), everywhere[0]) * setting.head_dim**-0.5
        expected = torch.einsum("hij,jd->ihd", s.masked_fill(~visible, -torch.inf).softmax(-1), everywhere[1])
        gap = gap + (out[0, chosen, queries].float() - expected).square().sum()
        norm = norm + expected.square().sum()
    sums = torch.stack([gap, norm])
    dist.all_reduce(sums, group=place.ring.context_group)
    return float((sums[0] / sums[1]).sqrt())
