"""Ring cases and their comparison with one device. Every function runs on every rank of a pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan import Mask, Mesh, attention, context_attention
from ringspan.parallel import gradient_return, ring_overlapped
from ringspan.parallel.transport import select


@dataclass(frozen=True)
class RingCase:
    """One attention problem, and how ranks share it."""

    name: str
    kind: str = "zigzag"
    ring: int = 1
    ulysses: int = 1
    length: int = 37
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (16, 16)
    mask: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    transport: str = "p2p"
    backend: str = "reference"
    dtype: torch.dtype = torch.float64
    part_bytes: int = 2**28
    split_heads_above: int = 0  # shard rows × steps above which a forward launches two kernels per step
    tiles_per_sm: float = 0  # from which a backward computes the local block in halves
    small_bytes: int = 2**26  # of the local dK/dV, above which returned gradients are kept
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.length}-{self.ring}x{self.ulysses}-{self.transport}"

    @contextmanager
    def patched_constants(self) -> Iterator[None]:
        """Set the limits that are module constants."""
        limit = patch.object(ring_overlapped, "SPLIT_HEADS_ABOVE", self.split_heads_above)
        halves = patch.object(gradient_return, "TILES_PER_SM", self.tiles_per_sm)
        small = patch.object(gradient_return, "SMALL_BYTES", self.small_bytes)
        with patch.object(select, "PART_BYTES", self.part_bytes), limit, halves, small:
            yield


@cache
def make_mesh(ring: int, ulysses: int = 1, data: int = 1) -> Mesh:
    return Mesh(data=data, ring=ring, ulysses=ulysses)


def make_mask(arguments: dict[str, Any], device: str = "cpu") -> Mask:
    tensors = {name: torch.tensor(x, device=device) for name, x in arguments.items() if isinstance(x, list)}
    return Mask(**arguments | tensors)


def make_inputs(case: RingCase, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of the whole sequence, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    (heads, kv_heads), (width, v_width) = case.heads, case.widths
    sizes = {"q": (heads, width), "k": (kv_heads, width), "v": (kv_heads, v_width), "dout": (heads, v_width)}
    inputs = {
        name: torch.randn(case.batch, case.length, *size, dtype=torch.float64, generator=generator).to(case.dtype)
        for name, size in sizes.items()
    }
    stats_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    inputs["dlse"] = torch.randn(case.batch, heads, case.length, dtype=stats_dtype, generator=generator)
    if case.sinks:
        inputs["sinks"] = torch.randn(heads, dtype=stats_dtype, generator=generator)
    return {name: x.to(case.device) for name, x in inputs.items()}


def run_single(case: RingCase, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and all gradients of `attention` on one device."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in inputs}
    q, k, v = (leaves[name] for name in "qkv")
    options = dict(sinks=leaves.get("sinks"), return_lse=True, backend=case.backend)
    out, lse = attention(q, k, v, make_mask(case.mask), **options, **case.options)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [inputs["dout"], inputs["dlse"]])
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def run_shards(case: RingCase, inputs: dict[str, Tensor], mask_device: str = "cpu") -> dict[str, Tensor]:
    """The same of `context_attention` for this rank's shards; the sinks' gradient is summed over the ranks."""
    mesh = make_mesh(case.ring, case.ulysses)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    poison = float("nan")  # in padding rows, which must not be read
    shards = {name: layout.shard(inputs[name], 1, rank, fill=poison) for name in ("q", "k", "v", "dout")}
    dlse = layout.shard(inputs["dlse"], 2, rank, fill=poison)
    leaves = {name: shards[name].requires_grad_() for name in "qkv"}
    if "sinks" in inputs:
        leaves["sinks"] = inputs["sinks"].clone().requires_grad_()
    q, k, v = (leaves[name] for name in "qkv")
    options = dict(sinks=leaves.get("sinks"), return_lse=True, backend=case.backend, transport=case.transport)
    mask = make_mask(case.mask, mask_device)
    with case.patched_constants():
        out, lse = context_attention(q, k, v, mask, layout=layout, mesh=mesh, **options, **case.options)
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [shards["dout"], dlse])
    result = {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    if "dsinks" in result and dist.is_initialized():
        dist.all_reduce(result["dsinks"])
    return result


def shard_results(case: RingCase, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shards of the results of a single device; padding rows are 0, and −inf in lse."""
    mesh = make_mesh(case.ring, case.ulysses)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    shards = {}
    for name, x in results.items():
        if name == "dsinks":
            shards[name] = x
        elif name == "lse":
            shards[name] = layout.shard(x, 2, rank, fill=-float("inf"))
        else:
            shards[name] = layout.shard(x, 1, rank)
    return shards


def compare(case: RingCase) -> dict[str, float]:
    """Largest difference of each result to a single device. NaN counts as infinite, and so does an infinity out of place."""
    inputs = make_inputs(case)
    return differences(run_shards(case, inputs), shard_results(case, run_single(case, inputs)))


def compare_on_device(case: RingCase) -> dict[str, float]:
    """The same with documents in device memory only."""
    inputs = make_inputs(case)
    return differences(run_shards(case, inputs, mask_device=case.device), shard_results(case, run_single(case, inputs)))


def differences(results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    gaps = {}
    for name, ref in expected.items():
        x = results[name]
        assert x.shape == ref.shape and x.dtype == ref.dtype, f"{name}: {x.dtype} {tuple(x.shape)}, not {tuple(ref.shape)}"
        same_infinities = torch.equal(x == -float("inf"), ref == -float("inf"))
        gap = torch.where(ref == -float("inf"), 0, x - ref).abs()
        gaps[name] = float(gap.max()) if gap.numel() and same_infinities and not gap.isnan().any() else 0.0
        if not same_infinities or gap.isnan().any():
            gaps[name] = float("inf")
    return gaps


def remake_groups(store: str) -> tuple[float, str]:
    """Largest error of a ring before and after its groups are destroyed and made anew; the error of a mesh of the old ones."""
    case, worst = RingCase("remade", ring=2, mask=dict(causal=True)), max(compare(RingCase("first", ring=2)).values())
    old_mesh, rank = make_mesh(2), dist.get_rank()
    dist.destroy_process_group()
    make_mesh.cache_clear()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    for _ in range(5):
        worst = max(worst, *compare(case).values())
    q = torch.randn(1, 8, 2, 16)
    try:
        context_attention(q, q, q, layout=old_mesh.layout("zigzag", 16), mesh=old_mesh)
    except ValueError as error:
        return worst, str(error)
    return worst, "none"
