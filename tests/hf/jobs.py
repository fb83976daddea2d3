"""Bodies of tests that run on the ranks of one pool; each forms the groups that it needs."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringspan import Mesh
from ringspan.hf import RingContext, context_parallel
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
