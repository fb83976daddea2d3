"""Bodies of tests of ringspan.compat.ring_flash_attn that run on every rank of a pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.compat import ring_flash_attn
from ringspan.compat.flash_attn import flash_attn_varlen_func
from ringspan.compat.ring_flash_attn import exchange
from ringspan.parallel import ring
from tests.kernels.helpers.dense import boundaries, dense_varlen

WIDTH = 16


@dataclass(frozen=True)
class CompatCase:
    """A call of ring-flash-attn. Lengths are those of whole documents; one length is a batch of two sequences."""

    function: str  # without func, kvpacked_func or qkvpacked_func
    lengths: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = (("causal", True),)
    heads: tuple[int, int] = (4, 2)
    whole: bool = False  # pass the boundaries of whole documents
    width: int = WIDTH

    @property
    def kind(self) -> str:
        return self.function.partition("_")[0]

    @property
    def is_packed(self) -> bool:
        return "varlen" in self.function


def shard(x: Tensor, case: CompatCase, rank: int, ranks: int) -> Tensor:
    """Rows (T, …) of a rank: of each document, or for llama3 of the packed sequence, as ring-flash-attn's tests cut them."""
    pieces = []
    for document in [x] if case.kind == "llama3" else x.split(list(case.lengths)):
        if case.kind == "stripe":
            pieces.append(document[rank::ranks])
            continue
        parts = document.split(max(1, -(-len(document) // (2 * ranks if case.kind == "zigzag" else ranks))))
        numbers = (rank, 2 * ranks - 1 - rank) if case.kind == "zigzag" else (rank,)
        pieces += [parts[i] for i in numbers if i < len(parts)]
    return torch.cat([*pieces, x[:0]])


def truth(case: CompatCase, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse as (T, Hq) and gradients of dense attention, in rows of the whole sequence."""
    options = dict(case.options)
    left, right = options.get("window_size", (-1, -1))
    window = (10**6 if left < 0 else left, 10**6 if right < 0 else right)
    leaves = [inputs[name].clone().requires_grad_() for name in "qkv"]
    causal, scale = options.get("causal", False), options.get("softmax_scale")
    out, lse = dense_varlen(*leaves, case.lengths, case.lengths, None, causal=causal, window=window, scale=scale)
    grads = torch.autograd.grad((out, lse.T), leaves, (inputs["dout"], inputs["dlse"]))
    return {"out": out.detach(), "lse": lse.detach().T} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def call(
    case: CompatCase, form: str, q: Tensor, k: Tensor, v: Tensor, ranks: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """out (n, Hq, D) and lse (n, Hq) of this rank's rows."""
    function = getattr(ring_flash_attn, f"{case.function}_{form}")
    options, dim, positional = dict(case.options) | dict(return_attn_probs=True), 1, []
    if case.kind == "llama3":
        whole = torch.tensor(boundaries(case.lengths), dtype=torch.int32, device=device)
        prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
        prepared = prepare(whole, options.get("causal", False), dist.get_rank() if ranks > 1 else 0, ranks)
        prepare(torch.tensor([0, 6 * ranks], dtype=torch.int32), True, 0, ranks)  # of another batch, in between
        options["heads_k_stride"], options["local_k_slice"] = 1, prepared[4]
        positional = [prepared[0].clone(), *prepared[1:4]]  # other packages move tensors to a device
    elif case.is_packed:
        whole = torch.tensor(boundaries(case.lengths), dtype=torch.int32, device=device)
        positional = [whole if case.whole else whole // ranks, max(case.lengths)]
    else:
        q, k, v, dim = q[None], k[None], v[None], 2
    if form == "func":
        out, lse, third = function(q, k, v, *positional, **options)
    elif form == "kvpacked_func":
        out, lse, third = function(q, torch.stack([k, v], dim), *positional, **options)
    else:
        out, lse, third = function(torch.stack([q, k, v], dim), *positional, **options)
    assert third is None
    return (out, lse.T) if case.is_packed else (out[0], lse[0].T)


def errors(cases: list[CompatCase]) -> dict[str, float]:
    """Largest difference of each case's out, lse and gradients to dense attention, in fp64."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for case in cases:
        generator = torch.Generator().manual_seed(3)
        total, (heads, kv_heads) = sum(case.lengths), case.heads
        sizes = dict(q=(total, heads, case.width), k=(total, kv_heads, case.width), v=(total, kv_heads, case.width))
        sizes |= dict(dout=sizes["q"], dlse=(total, heads))
        inputs = {name: torch.randn(*size, dtype=torch.float64, generator=generator) for name, size in sizes.items()}
        expected = {name: shard(x, case, rank, ranks) for name, x in truth(case, inputs).items()}
        for form in ("func", "kvpacked_func", "qkvpacked_func") if heads == kv_heads else ("func", "kvpacked_func"):
            leaves = [shard(inputs[name], case, rank, ranks).clone().requires_grad_() for name in "qkv"]
            out, lse = call(case, form, *leaves, ranks=ranks)
            grads = torch.autograd.grad((out, lse), leaves, [shard(inputs[x], case, rank, ranks) for x in ("dout", "dlse")])
            results = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
            assert all(results[name].shape == x.shape for name, x in expected.items())
            gaps = [float((results[name] - x).abs().max()) for name, x in expected.items() if x.numel()]
            found[f"{case} {form}"] = max(gaps, default=0.0)
    return found


def rms_errors(case: CompatCase) -> dict[str, tuple[float, float]]:
    """RMS error against fp64 of a case on GPUs in bf16, and of one call of flash_attn's function on one GPU."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    total, (heads, kv_heads) = sum(case.lengths), case.heads
    sizes = [(total, n, case.width) for n in (heads, kv_heads, kv_heads, heads)]
    *inputs, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    cu_seqlens = torch.tensor(boundaries(case.lengths), dtype=torch.int32, device="cuda")
    options = dict(case.options)

    def run(call_one: Callable[..., Any], tensors: list[Tensor], gradient: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = call_one(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def single(*tensors: Tensor) -> Any:
        return flash_attn_varlen_func(*tensors, cu_seqlens, cu_seqlens, total, total, **options)

    one, exact = run(single, inputs, dout), run(single, [x.double() for x in inputs], dout.double())
    shards = [shard(x, case, rank, ranks) for x in (*inputs, dout)]
    results = run(lambda *x: call(case, "func", *x, ranks=ranks, device="cuda")[0], shards[:3], shards[3])
    errors = {}
    for name, mine, alone, true in zip(("out", "dq", "dk", "dv"), results, one, exact, strict=True):
        expected, compared = shard(true, case, rank, ranks), shard(alone, case, rank, ranks)
        errors[name] = tuple(float((x.double() - expected).square().mean().sqrt()) for x in (mine, compared))
    return errors


def count_launches(num_documents: int) -> tuple[int, int]:
    """Numbers of all-to-alls and of attention kernels of one forward and backward."""
    counts = [0, 0]

    def counted(function: Callable[..., Any], index: int) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            counts[index] += 1
            return function(*args, **options)

        return wrapper

    x = torch.randn(400, 2, WIDTH, requires_grad=True)
    cu_seqlens = torch.arange(0, 401, 400 // num_documents, dtype=torch.int32)
    with (
        patch.object(exchange.dist, "all_to_all_single", counted(dist.all_to_all_single, 0)),
        patch.object(ring, "block_forward", counted(ring.block_forward, 1)),
        patch.object(ring, "block_backward", counted(ring.block_backward, 1)),
    ):
        ring_flash_attn.zigzag_ring_flash_attn_varlen_func(x, x, x, cu_seqlens, 400, causal=True).sum().backward()
    return counts[0], counts[1]


def dropout_pattern() -> Tensor:
    """The weights of this rank's rows after dropout; ranks' generators differ."""
    torch.manual_seed(dist.get_rank())
    n = 64 // dist.get_world_size()
    q, v = torch.zeros(1, n, 1, 64), torch.eye(64).reshape(1, dist.get_world_size(), n, 1, 64)[:, dist.get_rank()]
    return ring_flash_attn.ring_flash_attn_func(q, q, v, dropout_p=0.5)[0, :, 0]


def call_wrong(name: str, rank: int, change: dict[str, Any]) -> None:
    """A valid call, except that one rank's (−1: every rank's) arguments are changed."""
    ranks = dist.get_world_size()
    arguments: dict[str, Any] = dict(q=torch.randn(8, 2, WIDTH), k=torch.randn(8, 2, WIDTH), v=torch.randn(8, 2, WIDTH))
    if "llama3" in name:
        prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor([0, 8 * ranks], dtype=torch.int32), True, dist.get_rank(), ranks
        )
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
        arguments |= dict(zip(names, prepared, strict=True)) | dict(heads_k_stride=1)
    elif "varlen" in name:
        arguments |= dict(cu_seqlens=torch.tensor([0, 2, 8], dtype=torch.int32), max_seqlen=6)
    else:
        arguments = {key: x[None] for key, x in arguments.items()}
    arguments["causal"] = True
    if rank in (-1, dist.get_rank()):
        arguments |= change
    getattr(ring_flash_attn, name)(**arguments)


def baseline_gaps() -> list[float]:
    """Largest differences of out and gradients of the benchmark's baseline to our function, in fp32."""
    from ringspan.compat.bench import MergedRing, OwnKernel

    torch.manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(1, 32, heads, WIDTH) for heads in (4, 2, 2, 4))
    group, results = dist.group.WORLD, []
    for call in (
        lambda *x: ring_flash_attn.zigzag_ring_flash_attn_func(*x, causal=True, group=group),
        lambda *x: MergedRing.apply(*x, OwnKernel, group),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


def run_bench(arguments: list[str]) -> int:
    from ringspan.compat import bench
    from ringspan.parallel.bench.__main__ import main

    return main(arguments, bench.table())
