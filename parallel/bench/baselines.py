"""Candidates of the ring benchmark: our ring in every layout and transport, our Ulysses, one rank alone, and baselines.

A candidate makes a Problem as a context manager: this rank's share of one sequence, with fresh random tensors. It raises
ImportError if its package is not installed and ValueError if it does not support a setting.
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
from ringspan.kernels.bench.baselines import BASELINES
from ringspan.kernels.bench.shapes import Shape
from ringspan.kernels.mask import Mask
from ringspan.parallel.context_attention import context_attention
from ringspan.parallel.layout import KINDS
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.transport.select import COPY_TRANSPORTS, TRANSPORTS
from ringspan.parallel.ulysses import check_heads, repeat_heads, to_heads, to_tokens


@dataclass(frozen=True)
class Setting:
    """One causal sequence, sharded over all ranks."""

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
        """Return the attention problem of a sequence of this length."""
        return Shape(self.name, 1, length, self.heads, self.kv_heads, self.head_dim, window=self.window)

    def global_shape(self, ranks: int) -> Shape:
        """Return the attention problem of the whole sequence."""
        return self.shape(self.tokens * ranks)

    def single_rank_shape(self, ranks: int) -> Shape:
        """Return a problem for one rank without communication that costs as much as its share of the whole sequence.

        Causal work grows with the square of the length, so its length is tokens × √ranks.
        """
        if self.window:
            return self.shape(self.tokens)
        length = int(self.tokens * ranks**0.5)
        return self.shape(length // 128 * 128 or length)

    def mask(self) -> Mask:
        return Mask(causal=True, window=self.window)


class Problem(NamedTuple):
    """One rank's share of a problem: a call that returns out, and what a backward needs."""

    run: Callable[[], Any]
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    flops: float  # of this rank's forward


def forward_and_backward(problem: Problem) -> None:
    """Run a forward and its backward on the calling thread.

    Autograd's own thread would have to wake in each call. A training step wakes it once; here the host would launch the kernels
    of short shards too late.
    """
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(problem.run(), problem.leaves, problem.dout)


class BenchContext(NamedTuple):
    """Device, dtype and meshes of a benchmark. Meshes are made once: making a group is a collective and costs memory."""

    device: torch.device
    dtype: torch.dtype
    ranks: int
    ring: Mesh
    ulysses: Mesh
    backend: str


Make = Callable[[Setting, BenchContext], AbstractContextManager[Problem]]


class Candidate(NamedTuple):
    """One entry of the benchmark: ours or a baseline, with the device types that measure it by default."""

    label: str
    make: Make
    ours: bool
    devices: tuple[str, ...]


def _tensors(setting: Setting, context: BenchContext, length: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    heads = setting.heads, setting.kv_heads, setting.kv_heads, setting.heads
    sizes = [(1, length, n, setting.head_dim) for n in heads]
    q, k, v, dout = (torch.randn(size, device=context.device, dtype=context.dtype) for size in sizes)
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout


@contextmanager
def _alone(setting: Setting, context: BenchContext) -> Iterator[Problem]:
    shape = setting.single_rank_shape(context.ranks)
    leaves, dout = _tensors(setting, context, shape.length)
    mask = setting.mask()
    yield Problem(lambda: attention(*leaves, mask, backend=context.backend), leaves, dout, shape.flops())


def _ring(kind: str, transport: str) -> Make:
    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        global_shape = setting.global_shape(context.ranks)
        layout = context.ring.layout(kind, global_shape.length)
        leaves, dout = _tensors(setting, context, layout.local_length)
        options: dict[str, Any] = dict(layout=layout, mesh=context.ring, transport=transport, backend=context.backend)
        mask = setting.mask()
        run = lambda: context_attention(*leaves, mask, **options)  # noqa: E731
        yield Problem(run, leaves, dout, global_shape.flops() / context.ranks)

    return make


@contextmanager
def _ulysses(setting: Setting, context: BenchContext) -> Iterator[Problem]:
    global_shape = setting.global_shape(context.ranks)
    layout = context.ulysses.layout("contiguous", global_shape.length)
    leaves, dout = _tensors(setting, context, layout.local_length)
    options: dict[str, Any] = dict(layout=layout, mesh=context.ulysses, backend=context.backend)
    mask = setting.mask()
    run = lambda: context_attention(*leaves, mask, **options)  # noqa: E731
    yield Problem(run, leaves, dout, global_shape.flops() / context.ranks)


def _ulysses_over(kernel: str) -> Make:
    """Our Ulysses exchange around a baseline's kernel."""

    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        global_shape, ranks = setting.global_shape(context.ranks), context.ranks
        check_heads(setting.heads, ranks, ranks)
        leaves, dout = _tensors(setting, context, setting.tokens)
        kv_heads = repeat_heads(leaves[1], ranks).shape[2] // ranks
        local = Shape(
            global_shape.name, 1, global_shape.length, setting.heads // ranks, kv_heads, setting.head_dim, window=setting.window
        )
        group, context_group = context.ulysses.ulysses_group, context.ulysses.context_group
        assert group is not None and context_group is not None
        exchange = ranks, group.group_name, context_group.group_name

        def run() -> Tensor:
            q, k, v = leaves
            inputs = to_heads(q, *exchange), to_heads(k, *exchange), to_heads(v, *exchange)
            return to_tokens(BASELINES[kernel].run(*inputs, local), *exchange)

        yield Problem(run, leaves, dout, global_shape.flops() / ranks)

    return make


@cache
def _device_mesh(device: str, ranks: int) -> DeviceMesh:
    return init_device_mesh(device, (ranks,), mesh_dim_names=("context",))


def _torch_context_parallel(rotate: str) -> Make:
    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if setting.window or setting.heads != setting.kv_heads:
            raise ValueError("supports neither windows nor fewer KV heads than query heads")
        global_shape = setting.global_shape(context.ranks)
        set_rotate_method(rotate)
        size = (1, setting.heads, global_shape.length, setting.head_dim)
        q, k, v = (torch.randn(size, device=context.device, dtype=context.dtype) for _ in range(3))
        with context_parallel(
            _device_mesh(context.device.type, context.ranks),
            buffers=[q, k, v],
            buffer_seq_dims=[2, 2, 2],
            no_restore_buffers={q, k, v},
        ):
            leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

            def run() -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(*leaves, is_causal=True)

            yield Problem(run, leaves, torch.randn_like(q), global_shape.flops() / context.ranks)

    return make


def candidates() -> dict[str, Candidate]:
    """Return the candidates by name. The first, "alone", is what shares refer to."""
    any_device, gpus = ("cuda", "cpu"), ("cuda",)
    table: dict[str, Candidate] = {"alone": Candidate("one rank alone", _alone, True, any_device)}
    for kind in KINDS:
        for transport in TRANSPORTS:
            devices: tuple[str, ...] = () if transport == "auto" else gpus if transport in COPY_TRANSPORTS else any_device
            label = f"Ringspan ring, {kind}, {transport}"
            table[f"ring-{kind}-{transport}"] = Candidate(label, _ring(kind, transport), True, devices)
    table["ulysses"] = Candidate("Ringspan Ulysses", _ulysses, True, any_device)
    for kernel in ("sdpa-cudnn", "fa4", "sdpa-flash"):
        label, _, devices = BASELINES[kernel]
        table[f"ulysses-{kernel}"] = Candidate(
            f"Ulysses over {label}", _ulysses_over(kernel), False, gpus if kernel != "sdpa-flash" else ("cpu",)
        )
    for rotate in ("allgather", "alltoall"):
        label = f"torch context_parallel, cuDNN, {rotate}"
        table[f"torch-cp-{rotate}"] = Candidate(label, _torch_context_parallel(rotate), False, gpus)
    return table


def sampled_error(problem: Problem, setting: Setting, context: BenchContext, kind: str, rows: int = 32) -> float:
    """Return the relative RMS error of a ring's out against fp32.

    The sample is the first and the last KV head, at `rows` rows of every rank.
    """
    layout = context.ring.layout(kind, setting.tokens * context.ranks)
    q, k, v = (x.detach() for x in problem.leaves)
    out = problem.run().detach()
    positions = layout.positions(context.ring.context_rank, context.device)
    valid = (positions < layout.length).nonzero()[:, 0]
    sample = valid[torch.linspace(0, len(valid) - 1, rows, device=context.device).long()] if len(valid) else valid
    visible = setting.mask().visible(positions[sample], torch.arange(layout.length, device=context.device))[0]
    gap = norm = torch.zeros((), device=context.device)
    group = setting.heads // setting.kv_heads
    for head in {0, setting.kv_heads - 1}:
        full_kv = []
        for x in (k, v):
            local = x[0, :, head].contiguous()
            shards = [torch.empty_like(local) for _ in range(context.ranks)]
            dist.all_gather(shards, local, group=context.ring.context_group)
            full_kv.append(layout.unshard(shards, 0).float())
        queries = slice(head * group, (head + 1) * group)
        s = torch.einsum("ihd,jd->hij", q[0, sample, queries].float(), full_kv[0]) * setting.head_dim**-0.5
        expected = torch.einsum("hij,jd->ihd", s.masked_fill(~visible, -torch.inf).softmax(-1), full_kv[1])
        gap = gap + (out[0, sample, queries].float() - expected).square().sum()
        norm = norm + expected.square().sum()
    sums = torch.stack([gap, norm])
    dist.all_reduce(sums, group=context.ring.context_group)
    return float((sums[0] / sums[1]).sqrt())
