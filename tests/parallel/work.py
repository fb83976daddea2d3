"""What the ranks of a pool are told to do. Every function runs on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan import Mask, Mesh, attention, context_attention
from ringspan.parallel import ring
from ringspan.parallel.transport import select


@dataclass(frozen=True)
class RingCase:
    """A sequence, what is asked of it, and how ranks share it."""

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
    long: int = 0  # above how many rows and steps a forward may give kernels two at a time
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.length}-{self.ring}x{self.ulysses}-{self.transport}"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """What no argument says."""
        with patch.object(select, "PART_BYTES", self.part_bytes), patch.object(ring, "LONG", self.long):
            yield


@cache
def mesh(ring: int, ulysses: int = 1, data: int = 1) -> Mesh:
    return Mesh(data=data, ring=ring, ulysses=ulysses)


def make_mask(given: dict[str, Any], device: str = "cpu") -> Mask:
    tensors = {name: torch.tensor(x, device=device) for name, x in given.items() if isinstance(x, list)}
    return Mask(**given | tensors)


def inputs(case: RingCase, seed: int = 0) -> dict[str, Tensor]:
    """The whole sequence, alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    (heads, kv_heads), (width, v_width) = case.heads, case.widths
    sizes = {"q": (heads, width), "k": (kv_heads, width), "v": (kv_heads, v_width), "dout": (heads, v_width)}
    made = {
        name: torch.randn(case.batch, case.length, *size, dtype=torch.float64, generator=generator).to(case.dtype)
        for name, size in sizes.items()
    }
    stats = torch.float64 if case.dtype == torch.float64 else torch.float32
    made["dlse"] = torch.randn(case.batch, heads, case.length, dtype=stats, generator=generator)
    if case.sinks:
        made["sinks"] = torch.randn(heads, dtype=stats, generator=generator)
    return {name: x.to(case.device) for name, x in made.items()}


def single(case: RingCase, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and all gradients on one device."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}
    q, k, v = (leaves[name] for name in "qkv")
    extra = dict(sinks=leaves.get("sinks"), return_lse=True, backend=case.backend)
    out, lse = attention(q, k, v, make_mask(case.mask), **extra, **case.options)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [given["dout"], given["dlse"]])
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def shared(case: RingCase, given: dict[str, Tensor], mask_on: str = "cpu") -> dict[str, Tensor]:
    """The same from this rank's shards; its own part of the sinks' gradient is summed over the ranks."""
    here = mesh(case.ring, case.ulysses)
    layout, rank = here.layout(case.kind, case.length), here.context_rank
    poison = float("nan")  # in rows of padding, which nothing may read
    mine = {name: layout.shard(given[name], 1, rank, fill=poison) for name in ("q", "k", "v", "dout")}
    dlse = layout.shard(given["dlse"], 2, rank, fill=poison)
    leaves = {name: mine[name].requires_grad_() for name in "qkv"}
    if "sinks" in given:
        leaves["sinks"] = given["sinks"].clone().requires_grad_()
    q, k, v = (leaves[name] for name in "qkv")
    extra = dict(sinks=leaves.get("sinks"), return_lse=True, backend=case.backend, transport=case.transport)
    mask = make_mask(case.mask, mask_on)
    with case.installed():
        out, lse = context_attention(q, k, v, mask, layout=layout, mesh=here, **extra, **case.options)
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [mine["dout"], dlse])
    result = {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    if "dsinks" in result and dist.is_initialized():
        dist.all_reduce(result["dsinks"])
    return result


def shard_of(case: RingCase, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank should have; rows of padding are 0, and -inf in lse."""
    here = mesh(case.ring, case.ulysses)
    layout, rank = here.layout(case.kind, case.length), here.context_rank
    part = {}
    for name, x in whole.items():
        if name == "dsinks":
            part[name] = x
        elif name == "lse":
            part[name] = layout.shard(x, 2, rank, fill=-float("inf"))
        else:
            part[name] = layout.shard(x, 1, rank)
    return part


def compare(case: RingCase) -> dict[str, float]:
    """The largest difference of each result; NaN is infinite, and so is an infinity in the wrong place."""
    given = inputs(case)
    return differences(shared(case, given), shard_of(case, single(case, given)))


def compare_on_device(case: RingCase) -> dict[str, float]:
    """The same with documents that only the device knows."""
    given = inputs(case)
    return differences(shared(case, given, mask_on=case.device), shard_of(case, single(case, given)))


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    for name, ref in expected.items():
        x = got[name]
        assert x.shape == ref.shape and x.dtype == ref.dtype, f"{name}: {x.dtype} {tuple(x.shape)}, not {tuple(ref.shape)}"
        equal_ends = torch.equal(x == -float("inf"), ref == -float("inf"))
        gap = torch.where(ref == -float("inf"), 0, x - ref).abs()
        found[name] = float(gap.max()) if gap.numel() and equal_ends and not gap.isnan().any() else 0.0
        if not equal_ends or gap.isnan().any():
            found[name] = float("inf")
    return found
