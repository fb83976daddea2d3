"""What a training step costs, in operations and parameters: the one source for MFU and for the planner. Imports no torch.

Two conventions, always named. *3×* ("model") counts forward and backward as 3 forwards: a weight of a matrix product costs 2
operations per token forward and 4 backward, a pair of a query and a key that see each other costs 4 · head_dim in each head,
times 3. *3.5×* ("kernel") counts attention as its kernels run: the backward has five products for the forward's two. Both
count the pairs that the mask truly lets through: causal, window and documents. The embedding is a look-up and counts nothing,
nor does what runs again in the backward to save memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ringspan.trainer.config.schema import Model

CONVENTIONS = {"3x": 3.0, "3.5x": 3.5}
# Dense bf16 operations a second, as their makers state them.
PEAKS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "MI300X": 1307e12}


@dataclass(frozen=True)
class Parameters:
    """How many numbers the model has, by term."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int  # 0 if tied
    products: int  # of these, those that tokens are multiplied with: the head's too if it is tied

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def head_dim(model: Model) -> int:
    return model.head_dim or model.dim // model.heads


def window(model: Model, layer: int) -> int:
    """How many tokens this layer looks back, itself included; 0: all."""
    return model.windows[layer % len(model.windows)] if model.windows else 0


def parameters(model: Model) -> Parameters:
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
        products=model.layers * (qkvo + mlp) + table,
    )


def visible_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """How many (query, key) pairs a causal mask lets through, of documents so long."""
    total = 0
    for length in map(int, lengths):
        near = min(length, window) if window else length
        total += near * (near + 1) // 2 + (length - near) * near
    return total


def attention_flops(model: Model, lengths: Iterable[int], factor: float) -> float:
    """Of all layers, for documents so long. factor 1 is the forward alone."""
    lengths = list(lengths)
    by_window = {w: visible_pairs(lengths, w) for w in {window(model, layer) for layer in range(model.layers)}}
    pairs = sum(by_window[window(model, layer)] for layer in range(model.layers))
    return factor * 4 * model.heads * head_dim(model) * pairs


def training_flops(model: Model, lengths: Iterable[int], convention: str = "3.5x") -> float:
    """Forward and backward of packed documents of these lengths; padding counts as nothing."""
    lengths = list(lengths)
    products = 6 * parameters(model).products * sum(lengths)
    return products + attention_flops(model, lengths, CONVENTIONS[convention])
