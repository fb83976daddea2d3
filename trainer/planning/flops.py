"""Parameters and FLOPs of a training step, for MFU and for the planner. Imports no torch.

Two conventions, always named. Both count forward and backward of each matmul as 3 forwards: a weight costs 2 FLOPs per token
in the forward and 4 in the backward.

    3×    ("model")    attention: 3 · 4 · head_dim per head and visible (query, key) pair
    3.5×  ("kernel")   attention: 3.5 · 4 · head_dim, as the kernels run: 5 matmuls in the backward, 2 in the forward

A pair is visible if the mask lets the query attend to the key: causal, window and documents. The embedding is a lookup and
counts nothing; neither does recomputation.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ringspan.trainer.config.schema import Model

CONVENTIONS = {"3x": 3.0, "3.5x": 3.5}
PEAKS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "MI300X": 1307e12}  # datasheets, dense bf16 FLOP/s


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by term."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int  # 0 if tied
    matmuls: int  # weights that tokens are multiplied with; includes the head's, tied or not

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def head_dim(model: Model) -> int:
    return model.head_dim or model.dim // model.heads


def window(model: Model, layer: int) -> int:
    """Return the window of a layer in tokens, the token itself included; 0: no window."""
    return model.windows[layer % len(model.windows)] if model.windows else 0


def parameters(model: Model) -> Parameters:
    """Count the parameters of a model whose vocabulary and max_positions are resolved."""
    dim, bias, width = model.dim, int(model.bias), head_dim(model)
    heads, kv_heads = model.heads * width, model.kv_heads * width
    qkvo = dim * (heads + 2 * kv_heads) + heads * dim
    gates = 2 if model.activation == "swiglu" else 1
    mlp = (gates + 1) * dim * model.mlp_dim
    norm = dim * (1 + (bias if model.norm == "layernorm" else 0))
    extras = bias * (heads + 2 * kv_heads + dim) + model.heads * model.sinks
    table = model.vocabulary * dim
    return Parameters(
        embedding=table + (model.max_positions * dim if model.positions == "learned" else 0),
        attention=model.layers * (qkvo + extras),
        mlp=model.layers * (mlp + bias * (gates * model.mlp_dim + dim)),
        norms=model.layers * (2 * norm + 2 * width * model.qk_norm) + norm,
        head=0 if model.tied else table,
        matmuls=model.layers * (qkvo + mlp) + table,
    )


def visible_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """Return the number of visible (query, key) pairs under a causal mask, for documents of these lengths."""
    total = 0
    for length in map(int, lengths):
        near = min(length, window) if window else length
        total += near * (near + 1) // 2 + (length - near) * near
    return total


def attention_flops(model: Model, lengths: Iterable[int], factor: float) -> float:
    """Return attention's FLOPs in all layers, for documents of these lengths; factor 1 is the forward alone."""
    lengths = list(lengths)
    by_window = {w: visible_pairs(lengths, w) for w in {window(model, layer) for layer in range(model.layers)}}
    pairs = sum(by_window[window(model, layer)] for layer in range(model.layers))
    return factor * 4 * model.heads * head_dim(model) * pairs


def training_flops(model: Model, lengths: Iterable[int], convention: str = "3.5x") -> float:
    """Return the FLOPs of forward and backward, for packed documents of these lengths. Padding counts nothing."""
    lengths = list(lengths)
    matmuls = 6 * parameters(model).matmuls * sum(lengths)
    return matmuls + attention_flops(model, lengths, CONVENTIONS[convention])
