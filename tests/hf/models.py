"""Tiny random models of transformers, and batches: plain, left- and right-padded, packed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

import ringspan.hf
from tests.hf import oracle  # noqa: F401  registers "oracle"

ringspan.hf.register()

VOCABULARY, LENGTH, WINDOW = 61, 37, 5
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, dict(sliding_window=WINDOW)),
    "gemma2": (
        Gemma2Config,
        dict(sliding_window=WINDOW, layer_types=BOTH, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
    ),
    "gemma3": (Gemma3TextConfig, dict(sliding_window=WINDOW, layer_types=BOTH, query_pre_attn_scalar=24)),
    "gpt-oss": (GptOssConfig, dict(sliding_window=WINDOW, layer_types=BOTH, num_local_experts=4, num_experts_per_tok=2)),
}
KINDS = ("plain", "left", "right", "packed")


def make_model(name: str, attention: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A model with the same weights for the same name."""
    kind, options = CONFIGS[name]
    config = kind(**SHAPE | options | changes)
    experts = dict(experts_implementation="eager") if name == "gpt-oss" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # biases, norms and sinks would be constant
        parameter.data.normal_(0, 0.3, generator=generator) if parameter.ndim == 1 else parameter.data.mul_(8)
    return model.to(dtype)


def make_batch(kind: str, seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """Two rows of whole sequences with labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    batch = dict(input_ids=ids)
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, slice(0, 8) if kind == "left" else slice(length - 8, length)] = 0
        batch["attention_mask"], labels = mask, labels.masked_fill(mask == 0, -100)
        labels[0, 8] = -100  # a padding row would predict the first token after left padding
    if kind == "packed":  # documents of length 1, across shards, longer than a shard
        rows = [[1, length // 2 + 2, 3, 1, length - length // 2 - 7], [length - 9, 9]]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        labels = labels.masked_fill(batch["position_ids"] == 0, -100)
    return batch | dict(labels=labels)


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of a model; with a cache, transformers would not separate packed documents."""
    return {name: value for name, value in batch.items() if name != "labels"} | dict(use_cache=False)


def valid_rows(batch: dict[str, Tensor]) -> Tensor:
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def whole_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels in the logits' dtype; transformers' own loss is fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run_oracle(name: str, batch: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Logits of valid rows, the loss and all gradients of the oracle."""
    model = make_model(name, "oracle", dtype)
    logits = model(**inputs_of(batch)).logits
    loss = whole_loss(logits, batch["labels"])
    loss.backward()
    return {"logits": logits.detach()[valid_rows(batch)], "loss": loss.detach()} | gradients_of(model)


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {n: float((actual[n].detach() - x).abs().max() / x.abs().max().clamp(min=1e-300)) for n, x in expected.items()}


def worst(name: str, errors: dict[str, float]) -> tuple[float, float]:
    """The largest error, and that of Gemma's norm weights, whose gradients transformers sums in fp32."""
    norms = {key for key in errors if name.startswith("gemma") and "norm" in key}
    return max(e for key, e in errors.items() if key not in norms), max([errors[key] for key in norms], default=0.0)
