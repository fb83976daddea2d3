"""Bodies of tests of models of transformers through ring-flash-attn's adapter; every rank of a pool runs them."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ringspan.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
from ringspan.compat.ring_flash_attn.adapters import hf_adapter
from tests.hf.models import VOCABULARY, gradients_of, make_batch, make_model, relative_errors, run_oracle, valid_rows, worst

LENGTHS = (1, 17, 3, 15)  # 36 tokens, documents across shards


def packed_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return dict(input_ids=ids, position_ids=positions, labels=ids.masked_fill(positions == 0, -100))


def load(name: str, folder: str) -> Any:
    """A model from a folder, as a script loads it. flash_attn is not installed."""
    path = os.path.join(folder, name)
    if dist.get_rank() == 0 and not os.path.exists(path):
        make_model(name, "eager").save_pretrained(path)
    dist.barrier()
    options = dict(experts_implementation="eager") if name == "gpt-oss" else {}
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flash_attention_2", dtype=torch.float32, **options)
    return model.double()  # as the oracle's: loaded in fp64, Gemma's constants would have more digits


def ring_errors(names: list[str], folder: str) -> dict[str, tuple[float, float]]:
    """Largest relative errors of loss, logits and gradients of a packed batch against the oracle on one rank."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    substitute_hf_flash_attn(group, heads_k_stride=1)
    batch, errors = packed_batch(), {}
    for name in names:
        model = load(name, folder)
        assert model.config._attn_implementation == "flash_attention_2"
        cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        update_ring_flash_attn_params(cu_seqlens, group)
        ids, positions = (batch[key].chunk(ranks, 1)[rank] for key in ("input_ids", "position_ids"))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        losses = F.cross_entropy(logits[0], labels.chunk(ranks, 1)[rank][0], reduction="sum", ignore_index=-100)
        loss = losses / (labels != -100).sum()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        parts = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(parts, logits.detach().contiguous())
        results = {"logits": torch.cat(parts, 1)[0], "loss": total} | gradients_of(model)
        errors[name] = worst(name, relative_errors(results, run_oracle(name, batch)))
    return errors


def one_rank_errors(name: str, folder: str) -> dict[str, float]:
    """The same model with the ring switched off, on padded batches."""
    substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    hf_adapter.use_ring_attn(False)
    try:
        errors = {}
        for kind in ("plain", "left", "right"):
            batch = make_batch(kind)
            inputs = {key: x for key, x in batch.items() if key != "labels"}
            logits = load(name, folder)(**inputs, use_cache=False).logits[valid_rows(batch)]
            errors[kind] = float((logits - run_oracle(name, batch)["logits"]).abs().max())
        return errors
    finally:
        hf_adapter.use_ring_attn(True)


def wrong_call(folder: str, boundaries: list[int] | None, change: dict[str, Any]) -> None:
    """A forward of a llama with arguments that the ring cannot honour."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    hf_adapter.DATA_PARAMS.clear()
    if boundaries is not None:
        update_ring_flash_attn_params(torch.tensor(boundaries, dtype=torch.int32), dist.group.WORLD)
    batch = packed_batch()
    inputs = {key: batch[key].chunk(ranks, 1)[rank] for key in ("input_ids", "position_ids")}
    load("llama", folder)(**inputs | dict(use_cache=False) | change)
