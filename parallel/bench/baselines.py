"""Candidates of the ring benchmark: our ring in every layout and transport, our Ulysses, one rank alone, and baselines.

A candidate makes a Problem as a context manager: this rank's share of one sequence, with fresh random tensors. It raises
ImportError if its package is not installed, ValueError if it does not support a setting, and RefusedError if it was tried on
the setting and refused it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspan.kernels.attention import attention
from ringspan.kernels.bench.baselines import BASELINES
from ringspan.kernels.bench.measure import RefusedError
from ringspan.kernels.bench.shapes import Shape, mask_of
from ringspan.kernels.mask import Mask
from ringspan.parallel.context_attention import context_attention
from ringspan.parallel.layout import KINDS, Layout
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
    sinks: bool = False
    documents: int = 0  # packed into the sequence, of uneven lengths; 0: one text
    v_head_dim: int | None = None  # None: head_dim

    @property
    def v_width(self) -> int:
        """Head dim of v."""
        return self.v_head_dim or self.head_dim

    @property
    def name(self) -> str:
        k = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        parts = [f"v{self.v_head_dim}"] if self.v_head_dim else []
        parts += [f"window{self.window}"] if self.window else []
        parts += ["sinks"] * self.sinks + [f"docs{self.documents}"] * bool(self.documents)
        return "-".join([f"{k}-h{self.heads}-{self.kv_heads}-d{self.head_dim}", *parts])

    def tensor_shapes(self, rows: int) -> list[tuple[int, int, int, int]]:
        """Return the shapes of q, k, v and out."""
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        widths = self.head_dim, self.head_dim, self.v_width, self.v_width
        return [(1, rows, n, width) for n, width in zip(heads, widths, strict=True)]

    def shape(self, length: int) -> Shape:
        """Return the attention problem of a sequence of this length."""
        documents = document_lengths(self.documents, length) if self.documents else None
        sizes = 1, length, self.heads, self.kv_heads, self.head_dim
        return Shape(self.name, *sizes, window=self.window, documents=documents, v_head_dim=self.v_head_dim)

    def global_shape(self, ranks: int) -> Shape:
        """Return the attention problem of the whole sequence."""
        return self.shape(self.tokens * ranks)

    def single_rank_shape(self, ranks: int) -> Shape:
        """Return the problem that one rank computes without communication; shares of its speed compare FLOPs per time.

        With documents it is the whole sequence, with the same documents. Else it costs as much as a rank's share of the whole
        sequence: causal work grows with the square of the length, so its length is tokens × √ranks.
        """
        if self.documents:
            return self.global_shape(ranks)
        if self.window:
            return self.shape(self.tokens)
        length = int(self.tokens * ranks**0.5)
        return self.shape(length // 128 * 128 or length)

    def mask(self, length: int) -> Mask:
        """Return the mask of a sequence of this length."""
        return mask_of(self.shape(length))


def document_lengths(count: int, length: int) -> tuple[int, ...]:
    """Return the lengths of `count` documents that fill `length` tokens: uneven, each at least 1, the same in every process."""
    borders = [0, *sorted(random.Random(count).sample(range(1, length), count - 1)), length]
    return tuple(end - start for start, end in pairwise(borders))


class Problem(NamedTuple):
    """One rank's share of a problem: a call that returns out, and what a backward and a check need."""

    run: Callable[[], Any]
    leaves: tuple[Tensor, ...]  # q, k, v and sinks, if any
    dout: Tensor
    flops: float  # of this rank's forward
    layout: Layout  # of the rows of q, k and v
    heads_first: bool = False  # tensors are (B, H, n, D) instead of (B, n, H, D)


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


def _tensors(setting: Setting, context: BenchContext, length: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Random leaves of a shard, and dout. Sinks are equal on every rank."""
    shapes = setting.tensor_shapes(length)
    q, k, v, dout = (torch.randn(shape, device=context.device, dtype=context.dtype) for shape in shapes)
    sinks = [torch.randn(setting.heads, generator=torch.Generator().manual_seed(0)).to(context.device)] * setting.sinks
    return tuple(x.requires_grad_() for x in (q, k, v, *sinks)), dout


def _sinks(leaves: tuple[Tensor, ...]) -> Tensor | None:
    return leaves[3] if len(leaves) > 3 else None


@contextmanager
def _alone(setting: Setting, context: BenchContext) -> Iterator[Problem]:
    shape = setting.single_rank_shape(context.ranks)
    leaves, dout = _tensors(setting, context, shape.length)
    mask, options = setting.mask(shape.length), dict[str, Any](sinks=_sinks(leaves), backend=context.backend)
    q, k, v = leaves[:3]
    run = lambda: attention(q, k, v, mask, **options)  # noqa: E731
    yield Problem(run, leaves, dout, shape.flops(), Layout("contiguous", shape.length, 1))


def _sharded(setting: Setting, context: BenchContext, mesh: Mesh, kind: str, transport: str = "auto") -> Problem:
    """The problem of one rank of our ring or Ulysses."""
    global_shape = setting.global_shape(context.ranks)
    layout = mesh.layout(kind, global_shape.length)
    leaves, dout = _tensors(setting, context, layout.local_length)
    options: dict[str, Any] = dict(layout=layout, mesh=mesh, transport=transport, backend=context.backend)
    options |= dict(sinks=_sinks(leaves))
    mask = setting.mask(global_shape.length)
    q, k, v = leaves[:3]
    run = lambda: context_attention(q, k, v, mask, **options)  # noqa: E731
    return Problem(run, leaves, dout, global_shape.flops() / context.ranks, layout)


def _ring(kind: str, transport: str) -> Make:
    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        yield _sharded(setting, context, context.ring, kind, transport)

    return make


@contextmanager
def _ulysses(setting: Setting, context: BenchContext) -> Iterator[Problem]:
    yield _sharded(setting, context, context.ulysses, "contiguous")


def _ulysses_over(kernel: str) -> Make:
    """Our Ulysses exchange around a baseline's kernel."""

    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        global_shape, ranks = setting.global_shape(context.ranks), context.ranks
        if setting.sinks:
            raise ValueError("sinks=True: this benchmark calls the baselines' kernels without sinks")
        check_heads(setting.heads, ranks, ranks)
        leaves, dout = _tensors(setting, context, setting.tokens)
        kv_heads = repeat_heads(leaves[1], ranks).shape[2] // ranks
        local = replace(global_shape, heads=setting.heads // ranks, kv_heads=kv_heads)
        group, context_group = context.ulysses.ulysses_group, context.ulysses.context_group
        assert group is not None and context_group is not None
        exchange = ranks, group.group_name, context_group.group_name

        def run() -> Tensor:
            q, k, v = (to_heads(x, *exchange) for x in leaves)
            return to_tokens(BASELINES[kernel].run(q, k, v, local), *exchange)

        layout = context.ulysses.layout("contiguous", global_shape.length)
        yield Problem(run, leaves, dout, global_shape.flops() / ranks, layout)

    return make


@cache
def _device_mesh(device: str, ranks: int) -> DeviceMesh:
    return init_device_mesh(device, (ranks,), mesh_dim_names=("context",))


@contextmanager
def _torch_shards(setting: Setting, context: BenchContext, rotate: str) -> Iterator[Problem]:
    """torch's context_parallel over fresh tensors; it replaces torch's SDPA until the end. Its head-tail shards are zigzag."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    global_shape = setting.global_shape(context.ranks)
    set_rotate_method(rotate)
    shapes = [(batch, heads, rows, width) for batch, rows, heads, width in setting.tensor_shapes(global_shape.length)[:3]]
    q, k, v = (torch.randn(shape, device=context.device, dtype=context.dtype) for shape in shapes)
    mesh = _device_mesh(context.device.type, context.ranks)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}):
        leaves = tuple(x.requires_grad_() for x in (q, k, v))

        def run() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=setting.heads != setting.kv_heads)

        layout = context.ring.layout("zigzag", global_shape.length)
        dout = torch.randn(*q.shape[:3], setting.v_width, device=q.device, dtype=q.dtype)
        yield Problem(run, leaves, dout, global_shape.flops() / context.ranks, layout, heads_first=True)


def check_torch_context_parallel(setting: Setting, context: BenchContext, rotate: str) -> None:
    """Try each thing that plain causal attention does not have, on a short sequence.

    Raises:
        RefusedError: torch refuses one of them; the message has torch's errors.
        ValueError: torch accepts all, but the benchmark does not measure the mask, which would be a matrix.
    """
    short = replace(setting, tokens=256, documents=min(setting.documents, 8))
    layout = context.ring.layout("zigzag", short.tokens * context.ranks)
    tries: dict[str, dict[str, Any]] = {}
    if setting.heads != setting.kv_heads:
        tries["GQA"] = dict(is_causal=True, enable_gqa=True)
    if setting.window or setting.documents:
        keys = torch.arange(layout.length, device=context.device)
        visible = short.mask(layout.length).visible(layout.positions(context.ring.context_rank, context.device), keys)
        tries["attn_mask"] = dict(attn_mask=visible[:, None], enable_gqa=setting.heads != setting.kv_heads)
    if setting.sinks:
        tries["sinks"] = dict(is_causal=True, sinks=None)  # an argument that SDPA does not have
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # those of its kernels that take a mask
    refusals = []
    for name, options in tries.items():
        with _torch_shards(short, context, rotate) as problem:
            q, k, v = problem.leaves
            try:
                with sdpa_kernel(kernels):
                    out = F.scaled_dot_product_attention(q, k, v, **options)
                torch.autograd.grad(out, problem.leaves, problem.dout)
            except Exception as error:  # torch raises many types
                reason = str(error).strip().partition("\n")[0].partition(". ")[0]
                refusals.append(f"{name}: {type(error).__name__}, {reason[:80]}")
    if refusals:
        raise RefusedError("; ".join(refusals))
    if "attn_mask" in tries:
        raise ValueError("takes this mask only as a matrix, which is not practical at these lengths")


def _torch_context_parallel(rotate: str) -> Make:
    @contextmanager
    def make(setting: Setting, context: BenchContext) -> Iterator[Problem]:
        check_torch_context_parallel(setting, context, rotate)
        with _torch_shards(setting, context, rotate) as problem:
            yield problem

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


def sampled_error(problem: Problem, setting: Setting, context: BenchContext, rows: int = 32) -> float:
    """Return the relative RMS error of a candidate's out against fp32.

    The sample is the first and the last KV head, at `rows` rows of every rank.
    """
    layout, (q, k, v) = problem.layout, (x.detach() for x in problem.leaves[:3])
    out, sinks = problem.run().detach(), _sinks(problem.leaves)
    if problem.heads_first:
        q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
    positions = layout.positions(context.ring.context_rank if layout.ranks > 1 else 0, context.device)
    valid = (positions < layout.length).nonzero()[:, 0]
    sample = valid[torch.linspace(0, len(valid) - 1, rows, device=context.device).long()] if len(valid) else valid
    keys = torch.arange(layout.length, device=context.device)
    visible = setting.mask(layout.length).visible(positions[sample], keys)[0]
    gap = norm = torch.zeros((), device=context.device)
    group = setting.heads // setting.kv_heads
    for head in {0, setting.kv_heads - 1}:
        full_kv = []
        for x in (k, v):
            local = x[0, :, head].contiguous()
            shards = [torch.empty_like(local) for _ in range(layout.ranks)]
            if layout.ranks > 1:
                dist.all_gather(shards, local, group=context.ring.context_group)
            full_kv.append(layout.unshard(shards if layout.ranks > 1 else [local], 0).float())
        queries = slice(head * group, (head + 1) * group)
        s = torch.einsum("ihd,jd->hij", q[0, sample, queries].float(), full_kv[0]) * setting.head_dim**-0.5
        s = s.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # a sink is one more key, whose value is 0
            s = torch.cat([s, sinks.detach().float()[queries, None, None].expand(-1, len(sample), 1)], -1)
        expected = torch.einsum("hij,jd->ihd", s.softmax(-1)[..., : layout.length], full_kv[1])
        gap = gap + (out[0, sample, queries].float() - expected).square().sum()
        norm = norm + expected.square().sum()
    sums = torch.stack([gap, norm])
    dist.all_reduce(sums, group=context.ring.context_group)
    return float((sums[0] / sums[1]).sqrt())
