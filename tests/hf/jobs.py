"""Bodies of tests that run on the ranks of one pool; each forms the groups that it needs."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ringspan import Mesh
from ringspan.hf import RingContext, context_parallel, save_attention
from ringspan.parallel.transport.base import received
from tests.hf.models import (
    gradients_of,
    inputs_of,
    make_batch,
    make_model,
    relative_errors,
    run_oracle,
    valid_rows,
    whole_loss,
    worst,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_folder, _generation = "", 0
_rings: dict[tuple[int, int, str], RingContext] = {}


def enter_folder(folder: str) -> None:
    """Set the folder of rendezvous files. Called once, on all ranks."""
    global _folder
    _folder = folder
    os.environ["OMP_NUM_THREADS"] = "1"


def form_group(ranks: int) -> bool:
    """Make the first `ranks` ranks the default group; return whether this rank is one of them."""
    global _generation
    _generation += 1  # every rank counts every call
    rank = int(os.environ.setdefault("POOL_RANK", str(dist.get_rank() if dist.is_initialized() else -1)))
    if dist.is_initialized() and dist.get_world_size() == ranks:
        return True
    if dist.is_initialized():
        dist.destroy_process_group()
    _rings.clear()
    if rank >= ranks:
        return False
    store = f"file://{_folder}/{_generation}-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    return True


def make_ring(ranks: int, layout: str = "zigzag", data: int = 1, ulysses: int = 1) -> RingContext:
    key = data, ulysses, layout
    if key not in _rings:
        _rings[key] = context_parallel(Mesh(data, ranks // data // ulysses, ulysses), layout)
    return _rings[key]


def run_ring(model: Any, ring: RingContext, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits of valid rows, the loss and all gradients, with the backward after the `with`."""
    with ring:
        shard = ring.shard(batch)
        logits = model(**shard).logits
        loss = ring.loss(logits, shard["shift_labels"])
    loss.backward()
    ring.reduce_gradients(model)
    return {"logits": ring.gather(logits, shard)[valid_rows(batch)], "loss": loss.detach()} | gradients_of(model)


def parity(ranks: int, name: str, kinds: list[str], layout: str, ulysses: int = 1) -> dict[str, tuple[float, float]] | None:
    """Largest relative errors of a model on a ring against the oracle, for each kind of batch."""
    if not form_group(ranks):
        return None
    ring, errors = make_ring(ranks, layout, ulysses=ulysses), {}
    for kind in kinds:
        batch = make_batch(kind)
        results = run_ring(make_model(name, "ringspan"), ring, batch)
        errors[kind] = worst(name, relative_errors(results, run_oracle(name, batch)))
    return errors


def one_device(name: str, kind: str, attention: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same as `run_ring` without a ring."""
    batch = make_batch(kind)
    model = make_model(name, attention, dtype)
    logits = model(**inputs_of(batch)).logits
    loss = whole_loss(logits, batch["labels"])
    loss.backward()
    return {"logits": logits.detach()[valid_rows(batch)], "loss": loss.detach()} | gradients_of(model)


def shard_model(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def fsdp_step(
    name: str, kind: str, dtype: torch.dtype, policy: MixedPrecisionPolicy, prepare: Callable[[Any], None]
) -> dict[str, Tensor]:
    """The logits, the loss and all gradients, whole, of a model under fully_shard."""
    model, ring, batch = make_model(name, "ringspan", dtype).train(), make_ring(2), make_batch(kind)
    prepare(model)
    shard_model(model, policy)
    with ring:
        shard = ring.shard(batch)
        logits = model(**shard).logits
        loss = ring.loss(logits, shard["shift_labels"], gradients="mean")
    loss.backward()
    results = {"logits": ring.gather(logits, shard)[valid_rows(batch)], "loss": loss.detach()}
    return results | {name: gradient.full_tensor() for name, gradient in gradients_of(model).items()}


def checkpoint_layers(model: Any) -> None:
    model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=save_attention))


def compile_layers(model: Any) -> None:
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def fsdp_exact(ranks: int, name: str, kind: str) -> tuple[dict[str, float], list[int]] | None:
    """Largest errors in fp64, plain, checkpointed and compiled, and the blocks that a plain and a checkpointed step receive."""
    if not form_group(ranks):
        return None
    expected, errors, hops = run_oracle(name, make_batch(kind)), {}, []
    for prepare in (lambda model: None, checkpoint_layers, compile_layers):
        start = received["kv"]
        results = fsdp_step(name, kind, torch.float64, MixedPrecisionPolicy(), prepare)
        hops.append(received["kv"] - start)
        errors[getattr(prepare, "__name__", "")] = max(relative_errors(results, expected).values())
    return errors, hops[:2]


def fsdp_mixed(ranks: int) -> tuple[float, float] | None:
    """RMS error of all gradients against fp64: bf16 on a ring under FSDP, and eager bf16 on one rank."""
    if not form_group(ranks):
        return None
    name, batch = "mistral", make_batch("packed")
    truth = run_oracle(name, batch)
    ring = fsdp_step(name, "packed", torch.float32, BF16, checkpoint_layers)
    eager = make_model(name, "eager", torch.bfloat16)
    logits = eager(**inputs_of(batch)).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()).backward()
    return rms_error(ring, truth), rms_error(gradients_of(eager), truth)


def rms_error(results: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    names = [name for name in truth if name not in ("logits", "loss")]
    errors = [(results[n].double() - truth[n]).square().sum() / truth[n].square().sum() for n in names]
    return float(torch.stack(errors).mean().sqrt())
