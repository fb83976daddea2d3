"""Bodies of tests of FSDP2: a model of transformers under fully_shard on a ring."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ringspan.hf import save_attention
from ringspan.parallel.transport.base import received
from tests.hf import jobs
from tests.hf.models import gradients_of, inputs_of, make_batch, make_model, relative_errors, run_oracle, valid_rows

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard_model(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def step(
    name: str, kind: str, dtype: torch.dtype, policy: MixedPrecisionPolicy, prepare: Callable[[Any], None]
) -> dict[str, Tensor]:
    """The logits, the loss and all gradients, whole, of a model under fully_shard."""
    model, ring, batch = make_model(name, "ringspan", dtype).train(), jobs.make_ring(2), make_batch(kind)
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


def exact(ranks: int, name: str, kind: str) -> tuple[dict[str, float], list[int]] | None:
    """Largest errors in fp64, plain, checkpointed and compiled, and the blocks that a plain and a checkpointed step receive."""
    if not jobs.form_group(ranks):
        return None
    expected, errors, hops = run_oracle(name, make_batch(kind)), {}, []
    for prepare in (lambda model: None, checkpoint_layers, compile_layers):
        start = received["kv"]
        results = step(name, kind, torch.float64, MixedPrecisionPolicy(), prepare)
        hops.append(received["kv"] - start)
        errors[getattr(prepare, "__name__", "")] = max(relative_errors(results, expected).values())
    return errors, hops[:2]


def mixed(ranks: int) -> tuple[float, float] | None:
    """RMS error of all gradients against fp64: bf16 on a ring under FSDP, and eager bf16 on one rank."""
    if not jobs.form_group(ranks):
        return None
    name, batch = "mistral", make_batch("packed")
    truth = run_oracle(name, batch)
    ring = step(name, "packed", torch.float32, BF16, checkpoint_layers)
    eager = make_model(name, "eager", torch.bfloat16)
    logits = eager(**inputs_of(batch)).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()).backward()
    return rms_error(ring, truth), rms_error(gradients_of(eager), truth)


def rms_error(results: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    names = [name for name in truth if name not in ("logits", "loss")]
    errors = [(results[n].double() - truth[n]).square().sum() / truth[n].square().sum() for n in names]
    return float(torch.stack(errors).mean().sqrt())
