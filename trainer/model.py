"""The GPT, in one file: what a token goes through from its embedding to its loss.

    hidden = embedding[tokens]
    each layer:  hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    loss_sum, num_valid = cross-entropy of head(norm(hidden)) against labels

It is the Llama family's: RMSNorm, rotary positions, query heads that share key heads (GQA), SwiGLU, no biases.
`attention` is an argument with the signature of `kernels.attention`; one that spans ranks fits as well, since all else
here treats each token alone. Positions are an argument because only whoever cut the sequence knows where a token is; they
restart with each document. The loss is in the forward of the module that owns the head's weight, so that logits need not
exist, and so that whatever gathers weights for a module's forward has gathered the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from kernels import Mask, linear_cross_entropy

Attention = Callable[..., Any]  # (q, k, v, mask=…) -> out, as kernels.attention
Rotation = tuple[Tensor, Tensor]  # cos and sin, (B or 1, S, 1, head_dim / 2)


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    mlp_dim: int
    head_dim: int = 64  # heads · head_dim need not be dim
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True  # the head's weight is the embedding's

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "dim", "heads", "kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads}, kv_heads={self.kv_heads}: query heads share key heads in equal groups, "
                "so heads must be a multiple of kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions turn pairs of numbers, so it must be even")


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention = kernels.attention) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # GPT-2's: every layer adds twice to the residual stream, whose variance is to stay what it was.
                scale = (2 * config.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * scale)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor, mask: Mask, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses over labels != -100, and their number.

        tokens and labels are (B, S), positions (S,) or (B, S).
        """
        return linear_cross_entropy(self.hidden(tokens, mask, positions), self.head.weight, labels)

    def logits(self, tokens: Tensor, mask: Mask, positions: Tensor) -> Tensor:
        """(B, S, vocabulary): for generation. Training never needs them all at once."""
        return self.head(self.hidden(tokens, mask, positions))

    def hidden(self, tokens: Tensor, mask: Mask, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        rotation = self.rotation(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, mask, rotation)
        return self.norm(hidden)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The angles by which rotary positions turn each pair of a head, once for all layers.

        In fp64: an fp32 angle of position 4M is off by up to 0.25, a bf16 one of position 1000 by up to 2.
        """
        exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64, device=positions.device)
        frequencies = self.config.rope_base ** -(exponents / self.config.head_dim)
        angles = positions.double()[..., None, None] * frequencies  # (…, S, 1, head_dim / 2): one turn for all heads
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Layer(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = SelfAttention(config, attention)
        self.mlp_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, mask: Mask, rotation: Rotation) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), mask, rotation)
        return hidden + self.mlp(self.mlp_norm(hidden))


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, mask: Mask, rotation: Rotation) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))  # (B, S, H, D)
        out = self.attention(rotate(q, rotation), rotate(k, rotation), v, mask=mask)
        return self.o(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU: one projection decides how much of the other passes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the pair (x[i], x[i + D / 2]) by its angle, so that q · k depends only on how far apart the two stand.

    Halves and not neighbours are a pair, as in Hugging Face's Llama, whose weights so fit as they are.
    """
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
