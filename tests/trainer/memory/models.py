"""Small models that run by a memory plan, and their gradients."""

from typing import Any

import torch
from torch import Tensor

from ringspan.parallel.buffered_attention import BufferedAttention
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.memory.kept import KeptTensors, host_sizes
from ringspan.trainer.memory.plan import parse
from ringspan.trainer.memory.streamed import Streaming
from ringspan.trainer.model import GPT

SHAPE: dict[str, Any] = dict(vocabulary=97, dim=32, layers=5, heads=4, kv_heads=2, head_dim=16, mlp_dim=40)
# Every option of the model, in few models.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "q/k-norm, sinks, softcap": dict(qk_norm=True, sinks=True, softcap=5.0),
    "LayerNorm, GELU, biases": dict(norm="layernorm", activation="gelu", bias=True, positions="learned", max_positions=64),
    "dropout, windows, tied": dict(dropout=0.2, windows=[0, 7], tied=True),
    "one KV head": dict(kv_heads=1, logit_softcap=4.0),
    "as many KV heads": dict(kv_heads=4, qk_norm=True),
}


def build(
    plan: str,
    shape: Model,
    rows: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float64,
    attention: BufferedAttention | None = None,
) -> GPT:
    """Return a model with initial weights of seed 0 and noise, so that norms, biases and sinks are not trivial.

    Args:
        plan: text of the memory plan.
        shape: the model's shape.
        rows: tokens of each sequence on this rank.
        batch: sequences.
        dtype: of the weights.
        attention: of one rank by default.
    """
    attention = attention or BufferedAttention(backend="chunked")
    model = GPT(shape, Rope(), attention, seed=0).to(torch.float64)
    model.set_rope_frequencies()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    model = model.to(dtype)
    memory = parse(plan, shape)
    if not memory.keeps_everything:
        kept = KeptTensors(torch.device("cpu"), host_sizes(memory, shape, batch, rows, dtype))
        model.stream(Streaming(memory, shape.layers, attention, model.layers[0].functions, kept))
    return model


def gradients(
    model: GPT, tokens: Tensor, labels: Tensor, positions: Tensor, *rest: Tensor | None
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradient of each weight; `rest` are documents and seeds."""
    model.zero_grad()
    loss = model(tokens, labels, positions, *rest)[0]
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error, relative to each weight's largest gradient.

    The gradient of a key's bias is 0 but for rounding, because softmax ignores a constant: it is compared with the largest of
    all gradients.
    """
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    errors = []
    for name, gradient in expected.items():
        scale = largest if name.endswith("attention.k.bias") else gradient.abs().max()
        errors.append(float((found[name] - gradient).abs().max() / scale))
    return max(errors)
