"""Bodies of tests of packed sequences, device meshes and DTensors, which run on every rank of a pool."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ringspan import (
    Layout,
    Mask,
    Mesh,
    attention,
    attention_varlen,
    context_attention,
    ring_attention,
    ring_attention_varlen,
)
from ringspan.kernels.dropout import keep_mask
from ringspan.kernels.segments import one_segment
from ringspan.parallel.coordination import process_groups
from ringspan.parallel.transport.base import received
from tests.kernels.helpers.dense import boundaries, dense_varlen
from tests.parallel.helpers.work import differences

SEED = 2**40 + 9


@dataclass(frozen=True)
class PackedCase:
    """A packed sequence, and how ranks share it."""

    lengths: tuple[int, ...]
    kind: str = "zigzag"
    heads: tuple[int, int] = (4, 2)
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False
    transport: str = "p2p"
    backend: str = "reference"
    as_tensor: bool = False


def device_mesh(*sizes: int, names: tuple[str, ...] = ()) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names or None)


def inputs_and_truth(case: PackedCase) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole inputs, equal on every rank, and out, lse and gradients of dense attention."""
    generator = torch.Generator().manual_seed(1)
    total, (heads, kv_heads) = sum(case.lengths), case.heads
    sizes = dict(
        q=(total, heads, 16), k=(total, kv_heads, 16), v=(total, kv_heads, 24), dout=(total, heads, 24), dlse=(heads, total)
    )
    if case.sinks:
        sizes["sinks"] = (heads,)
    inputs = {name: torch.randn(*size, dtype=torch.float64, generator=generator) for name, size in sizes.items()}
    options, keep = dict(case.options), None
    if "dropout" in options:
        heads_range = range(heads)
        keep = keep_mask(torch.tensor(SEED), options["dropout"], 1, heads_range, torch.arange(total), one_segment(total))[0]
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in inputs}
    out, lse = dense_varlen(**leaves, lengths=case.lengths, key_lengths=case.lengths, keep=keep, **options)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (inputs["dout"], inputs["dlse"]), materialize_grads=True)
    return inputs, {"out": out.detach(), "lse": lse.detach()} | dict(zip((f"d{name}" for name in leaves), grads, strict=True))


def compare_packed(cases: list[PackedCase]) -> dict[str, dict[str, float]]:
    """Largest difference of each result of this rank's shards to dense attention; padding rows are 0, and −inf in lse."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    errors = {}
    for case in cases:
        inputs, truth = inputs_and_truth(case)
        layout = Layout(case.kind, sum(case.lengths), ranks)
        leaves = {name: layout.shard(inputs[name], 0, rank, fill=float("nan")).requires_grad_() for name in "qkv"}
        if case.sinks:
            leaves["sinks"] = inputs["sinks"].clone().requires_grad_()
        cu_seqlens: Any = boundaries(case.lengths)
        if case.as_tensor:
            cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
        options = dict(case.options) | dict(transport=case.transport, backend=case.backend, layout=layout)
        seed = SEED if "dropout" in options else None
        out, lse = ring_attention_varlen(**leaves, cu_seqlens=cu_seqlens, seed=seed, return_lse=True, **options)
        douts = [layout.shard(inputs["dout"], 0, rank, fill=float("nan")), layout.shard(inputs["dlse"], 1, rank)]
        grads = torch.autograd.grad((out, lse), list(leaves.values()), douts)
        results = {"out": out.detach(), "lse": lse.detach()} | dict(zip((f"d{name}" for name in leaves), grads, strict=True))
        expected = {name: layout.shard(x, 0, rank) for name, x in truth.items() if name not in ("lse", "dsinks")}
        expected["lse"] = layout.shard(truth["lse"], 1, rank, fill=-float("inf"))
        if case.sinks:
            dist.all_reduce(results["dsinks"])
            expected["dsinks"] = truth["dsinks"]
        errors[str(case)] = differences(results, expected)
    return errors


def rms_errors(transport: str, on_device: bool) -> dict[str, tuple[float, float]]:
    """RMS error against fp64 of a ring on GPUs in bf16, and of one call on one GPU."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lengths = (700, 1, 0, 1500, 37, 1810)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(4048, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2, 8))
    layout, cu_seqlens = Layout("zigzag", 4048, ranks), boundaries(lengths)
    on_gpu = torch.tensor(cu_seqlens, dtype=torch.int32, device="cuda")

    def run(call: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    single = run(lambda *x: attention_varlen(*x, on_gpu, window=900), [q, k, v], dout)
    exact = run(lambda *x: attention_varlen(*x, cu_seqlens, window=900), [x.double() for x in (q, k, v)], dout.double())
    options = dict(window=900, layout=layout, transport=transport)
    shards = [layout.shard(x, 0, rank) for x in (q, k, v, dout)]
    results = run(lambda *x: ring_attention_varlen(*x, on_gpu if on_device else cu_seqlens, **options), shards[:3], shards[3])
    errors = {}
    for name, mine, one, truth in zip(("out", "dq", "dk", "dv"), results, single, exact, strict=True):
        reference = layout.shard(truth, 0, rank)
        sums = torch.stack([(x.double() - reference).square().sum() for x in (mine, layout.shard(one, 0, rank))])
        dist.all_reduce(sums)
        errors[name] = float(sums[0]) ** 0.5, float(sums[1]) ** 0.5
    return errors


def compare_groups() -> list[float]:
    """The ring over the default group, a mesh, a named dimension of a mesh, and a process group."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    case = PackedCase((9, 0, 13, 7))
    inputs, truth = inputs_and_truth(case)
    layout = Layout(case.kind, sum(case.lengths), ranks)
    q, k, v = (layout.shard(inputs[name], 0, rank) for name in "qkv")
    mesh, named = device_mesh(ranks), device_mesh(ranks, names=("cp",))
    errors = []
    for group in (None, mesh, named, (named, "cp"), named["cp"], dist.new_group(list(range(ranks)))):
        out = ring_attention_varlen(q, k, v, boundaries(case.lengths), layout=layout, group=group)
        errors.append(float((out - layout.shard(truth["out"], 0, rank)).abs().max()))
    grid = device_mesh(1, ranks, names=("dp", "cp"))
    errors.append(
        float((ring_attention_varlen(q, k, v, boundaries(case.lengths), layout=layout, group=(grid, "cp")) - out).abs().max())
    )
    mask = Mask.from_lengths(case.lengths, causal=True)
    errors.append(
        float((ring_attention(q[None], k[None], v[None], mask, layout=layout, group=grid["cp"])[0] - out).abs().max())
    )
    return errors


def compare_compiled(as_tensor: bool) -> float:
    """Largest difference between torch.compile(fullgraph=True) over a device mesh and eager."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout, mesh = Layout("zigzag", 21, ranks), device_mesh(ranks)
    torch.manual_seed(0)
    x = [layout.shard(torch.randn(21, 2, 16), 0, rank).requires_grad_() for _ in range(3)]
    cu_seqlens: Any = torch.tensor([0, 4, 4, 21], dtype=torch.int32) if as_tensor else [0, 4, 4, 21]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention_varlen(q * 1.5, k, v.sin(), cu_seqlens, window=6, layout=layout, group=mesh).cos()

    results = []
    for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        out = function(*x)
        results.append([out, *torch.autograd.grad(out.sum(), x)])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def count_received(lengths: tuple[int, ...]) -> int:
    """Received K/V blocks of a forward over a contiguous layout."""
    layout = Layout("contiguous", sum(lengths), dist.get_world_size())
    x = torch.randn(layout.local_length, 2, 16)
    before = received["kv"]
    ring_attention_varlen(x, x, x, boundaries(lengths), layout=layout)
    return received["kv"] - before


def call_packed(changed_rank: int | None = None, **changes: Any) -> None:
    """A call of ring_attention_varlen on all ranks, with changed arguments on one rank, or on every rank."""
    layout = Layout("zigzag", 16, dist.get_world_size())
    options = dict(cu_seqlens=[0, 5, 16], layout=layout)
    if changed_rank in (None, dist.get_rank()):
        options |= changes
    x = torch.randn(layout.local_length, 2, 16)
    ring_attention_varlen(x, x, x, **options)


def _difference(result: Tensor, expected: Tensor) -> float:
    assert isinstance(result, DTensor) and result.shape == expected.shape, (type(result), result.shape)
    return float((result.full_tensor() - expected).abs().max())


def compare_dtensors(kind: str, length: int, packed: bool) -> dict[str, float]:
    """DTensors over a mesh of one dimension: results, gradients and the sinks' gradient, compared with one device.

    The DTensor holds the layout's order, and padding unless the layout is contiguous.
    """
    ranks = dist.get_world_size()
    mesh, layout = device_mesh(ranks), Layout(kind, length, ranks)
    torch.manual_seed(0)
    batch, sequence = (), 0
    if not packed:
        batch, sequence = (2,), 1
    q, k, v, dout = (torch.randn(*batch, length, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4))
    sinks = torch.randn(4, dtype=torch.float64)
    cu_seqlens = [0, length // 3, length // 3 + 1, length]
    mask = Mask.from_lengths([b - a for a, b in pairwise(cu_seqlens)], causal=True, window=9)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    whole = [x[None] for x in (q, k, v)] if packed else [q, k, v]
    out, lse = (x[0] if packed else x for x in attention(*whole, mask, sinks=sinks, return_lse=True))
    dlse = torch.randn_like(lse)
    truth = [out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]

    def in_layout(x: Tensor, dim: int) -> Tensor:
        """The tensor in the layout's order, shard after shard; itself if that is DTensor's order."""
        return x if kind == "contiguous" else torch.cat([layout.shard(x, dim, rank) for rank in range(ranks)], dim)

    def distributed(x: Tensor, dim: int) -> DTensor:
        return distribute_tensor(in_layout(x.detach(), dim), mesh, [Shard(dim)])

    d_leaves = [distributed(x, sequence).requires_grad_() for x in (q, k, v)]
    d_leaves.append(distribute_tensor(sinks.detach(), mesh, [Replicate()]).requires_grad_())
    options = dict(sinks=d_leaves[3], return_lse=True, layout=layout)
    if packed:
        d_out, d_lse = ring_attention_varlen(*d_leaves[:3], cu_seqlens, window=9, **options)
    else:
        d_out, d_lse = ring_attention(*d_leaves[:3], mask, **options)
    loss = (d_out * distributed(dout, sequence)).sum() + (d_lse.nan_to_num(0, 0, 0) * distributed(dlse, sequence + 1)).sum()
    loss.backward()
    assert tuple(d_out.placements) == (Shard(sequence),) and tuple(d_lse.placements) == (Shard(sequence + 1),)
    results = [d_out, d_lse.nan_to_num(0, 0, 0), *(x.grad for x in d_leaves)]
    dims = [sequence, sequence + 1, sequence, sequence, sequence]
    expected = [in_layout(x.detach(), dim) for x, dim in zip(truth[:5], dims, strict=True)] + [truth[5]]
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {name: _difference(x, y) for name, x, y in zip(names, results, expected, strict=True)}


def compare_dtensors_on_a_grid() -> list[float]:
    """2 × 2: the batch sharded or replicated over one dimension, the sequence over the ring; a ring of two Ulysses ranks."""
    torch.manual_seed(0)
    x = torch.randn(2, 22, 4, 16, dtype=torch.float64)
    expected = attention(x, x, x, Mask(causal=True))
    errors = []
    grid = device_mesh(2, 2, names=("dp", "cp"))
    layout, mesh = Layout("contiguous", 22, 2), Mesh.from_device_mesh(grid, ring="cp")
    for batch in (Shard(0), Replicate()):
        d = distribute_tensor(x, grid, [batch, Shard(1)])
        for call in (
            lambda d: ring_attention(d, d, d, Mask(causal=True), layout=layout),
            lambda d: ring_attention(d, d, d, Mask(causal=True), layout=layout, group=(grid, "cp")),
            lambda d: context_attention(d, d, d, Mask(causal=True), layout=layout, mesh=mesh),
        ):
            out = call(d)
            assert tuple(out.placements) == (batch, Shard(1))
            errors.append(_difference(out, expected))
    x = torch.randn(2, 24, 4, 16, dtype=torch.float64)
    grid = device_mesh(2, 2, names=("ring", "ulysses"))
    mesh = Mesh.from_device_mesh(grid, ring="ring", ulysses="ulysses")
    d = distribute_tensor(x, grid, [Shard(1), Shard(1)])
    out, lse = context_attention(d, d, d, Mask(causal=True), return_lse=True, layout=mesh.layout("contiguous", 24), mesh=mesh)
    truth = attention(x, x, x, Mask(causal=True), return_lse=True)
    return [*errors, _difference(out, truth[0]), _difference(lse, truth[1])]


def rejected(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "accepted"


def dtensor_errors() -> dict[str, str]:
    """Messages for DTensors that a ring of two ranks cannot take."""
    mesh, layout, causal = device_mesh(2), Layout("contiguous", 8, 2), Mask(causal=True)
    x = torch.randn(2, 8, 2, 16)

    def ring(q: Any, k: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: ring_attention(q, q if k is None else k, q, causal, **dict(layout=layout) | options)

    def placed(*placements: Placement) -> DTensor:
        return distribute_tensor(x, mesh, list(placements))

    d, local = placed(Shard(1)), layout.shard(x, 1, dist.get_rank())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    seed, sinks = (distribute_tensor(t, mesh, [Replicate()]) for t in (torch.tensor(1), torch.zeros(2)))
    short = distribute_tensor(x[:, :5], mesh, [Shard(1)])
    packed = distribute_tensor(x[0], mesh, [Shard(0)])
    return {
        "heads": rejected(ring(placed(Shard(2)))),
        "replicated": rejected(ring(placed(Replicate()), group=mesh)),
        "mixed": rejected(ring(d, local)),
        "unlike": rejected(ring(d, placed(Shard(2)))),
        "group": rejected(ring(d, group=alone)),
        "seed": rejected(ring(d, dropout=0.5, seed=seed)),
        "sinks": rejected(ring(local, sinks=sinks, group=mesh)),
        "sharded sinks": rejected(ring(d, sinks=distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))),
        "mesh": rejected(lambda: context_attention(d, d, d, causal, layout=layout)),
        "cu_seqlens": rejected(
            lambda: ring_attention_varlen(packed, packed, packed, distribute_tensor(torch.tensor([0, 8]), mesh), layout=layout)
        ),
        "length": rejected(ring(short)),
        "uneven zigzag": rejected(lambda: ring_attention(short, short, short, causal, layout=Layout("zigzag", 5, 2))),
    }


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], axes: dict[str, Any]) -> dict[str, Any]:
    """Sizes, this rank's place, and the ranks of each group of a mesh from a device mesh."""
    mesh = Mesh.from_device_mesh(device_mesh(*sizes, names=names), **axes)
    place: dict[str, Any] = {a: (getattr(mesh, a), getattr(mesh, f"{a}_rank")) for a in ("data", "ring", "ulysses")}
    for name in ("data", "ring", "ulysses", "context"):
        group = getattr(mesh, f"{name}_group")
        place[f"{name}_group"] = dist.get_process_group_ranks(group)
    return place | {
        "context_ranks": mesh.context_ranks,
        "context_rank": mesh.context_rank,
        "timeout": mesh.timeout.total_seconds(),
    }


def gradient_group_of_a_later_mesh() -> dict[str, bool]:
    """A ring call, then a Mesh over the same group: does the next call connect the Mesh's gradient group?"""
    grid, device = device_mesh(2), torch.device("cpu")
    before = process_groups.ring_groups(grid.get_group(), device)
    Mesh.from_device_mesh(grid)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        after = process_groups.ring_groups(grid.get_group(), device)
    connected = [call.kwargs["group"] for call in all_reduce.call_args_list]
    return {
        "same group": after.group is before.group,
        "other gradient group": after.gradient_group is not before.gradient_group,
        "connected": any(group is after.gradient_group for group in connected),
    }


def compare_on_device_mesh(sizes: tuple[int, ...], names: tuple[str, ...], axes: dict[str, Any]) -> float:
    """Largest difference of context_attention, which overlaps replicas of other ranks, to one device."""
    mesh = Mesh.from_device_mesh(device_mesh(*sizes, names=names), **axes)
    torch.manual_seed(mesh.data_rank)
    x = [torch.randn(1, 21, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = attention(*x, Mask(causal=True))
    expected = [out, *torch.autograd.grad(out.sum(), x)]
    layout, rank = mesh.layout("zigzag", 21), mesh.context_rank
    shards = [layout.shard(t.detach(), 1, rank).requires_grad_() for t in x]
    out = context_attention(*shards, Mask(causal=True), layout=layout, mesh=mesh)
    results = [out, *torch.autograd.grad(out[:, : layout.local_length].sum(), shards)]
    return max(float((a - layout.shard(b, 1, rank)).abs().max()) for a, b in zip(results, expected, strict=True))


def group_errors() -> dict[str, str]:
    """Messages for groups and device meshes that are not clear."""
    ranks = dist.get_world_size()
    grid = device_mesh(2, ranks // 2, names=("dp", "cp"))
    turned = DeviceMesh("cpu", torch.arange(ranks).flip(0), mesh_dim_names=("cp",))
    half = DeviceMesh("cpu", torch.arange(ranks).view(2, -1), mesh_dim_names=("dp", "cp"))["cp"]
    x = torch.randn(1, 4, 2, 16)

    def ring(group: Any) -> str:
        return rejected(lambda: ring_attention(x, x, x, layout=Layout("zigzag", 4 * ranks, ranks), group=group))

    def mesh(device_mesh: Any, **axes: Any) -> str:
        return rejected(lambda: Mesh.from_device_mesh(device_mesh, **axes))

    return {
        "grid": ring(grid),
        "unknown": ring((grid, "tp")),
        "type": ring("cp"),
        "ranks": ring((grid, "cp")),
        "order": ring(turned),
        "mesh type": mesh("cp"),
        "mesh part": mesh(half),
        "mesh axes": mesh(grid),
        "mesh unknown": mesh(grid, ring="tp"),
        "outside": ring(dist.GroupMember.NON_GROUP_MEMBER),
        "mesh data": mesh(grid, ring="cp", data=3),
        "mesh twice": mesh(grid, ring="cp", ulysses="cp"),
        "mesh order": mesh(turned),
    }


def synchronises(transport: str) -> tuple[bool, bool]:
    """Whether the host waits for the GPU in a forward and backward with packed documents, and in reading a number."""
    layout = Layout("zigzag", 4096, dist.get_world_size())
    mask = Mask.from_lengths([1000, 3096], causal=True)
    shards = [torch.randn(1, layout.local_length, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in shards)

    def ring() -> None:
        out = ring_attention(q, k, v, mask, layout=layout, transport=transport)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def waits(call: Callable[[], object]) -> bool:
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    for _ in range(4):  # the first calls compare arguments
        ring()
    return waits(ring), waits(q.sum().item)
