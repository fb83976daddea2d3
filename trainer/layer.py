"""A transformer layer: its weights, and the two functions of rows around attention that compute it.

    q, k, v = project(x)          norm, projections, q/k-norm, rotary
    y       = finish(x, out)      x + o(out), then + mlp(norm(·))

The functions take weights as arguments, so that one graph serves all layers and no hook of ZeRO 3 is inside.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringspan.kernels.mask import Mask
from ringspan.trainer.config.schema import Model
from ringspan.trainer.memory.streamed import RowFunctions, Weights
from ringspan.trainer.planning.flops import head_dim

Attention = Callable[..., Any]  # (q, k, v, mask=…) -> out, as ringspan.attention
Rotation = tuple[Tensor, Tensor]  # cos and sin, (B or 1, S, 1, head_dim / 2)


class Layer(nn.Module):
    """A transformer block: attention and MLP, each with a norm before it and a residual connection.

    q, k, v = project(x);  y = finish(x, attention(q, k, v)). Both treat each row (token) alone (`row_functions`).
    """

    def __init__(self, config: Model, functions: RowFunctions) -> None:
        super().__init__()
        self.functions, self.heads, self.kv_heads = functions, config.heads, config.kv_heads
        self.attention_norm = new_norm(config, config.dim)
        self.attention = SelfAttention(config)
        self.mlp_norm = new_norm(config, config.dim)
        self.mlp = MLP(config)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, mask: Mask, attention: Attention, seeds: Tensor | None
    ) -> Tensor:
        q, k, v = self.functions.project(hidden, *(rotation or (None, None)), *self.project_weights())
        out = attention(q, k, v, mask=mask, **self.attention_options(seeds))
        return self.functions.finish(hidden, out, *self.finish_weights())

    def project_weights(self, kv: slice | None = None) -> Weights:
        """Return the weights of `project`, those of some KV heads and their query heads, or all."""
        a, width = self.attention, self.attention.head_dim
        group = self.heads // self.kv_heads
        norm: Any = self.attention_norm
        parts: list[Tensor | None] = [norm.weight, getattr(norm, "bias", None)]
        for linear, heads in ((a.q, group), (a.k, 1), (a.v, 1)):
            rows = None if kv is None else slice(kv.start * heads * width, kv.stop * heads * width)
            for weight in (linear.weight, linear.bias):
                parts.append(weight if weight is None or rows is None else weight[rows])
        return *parts, *(None if norm is None else norm.weight for norm in (a.q_norm, a.k_norm))

    def finish_weights(self) -> Weights:
        """Return the weights of `finish`."""
        o, norm, m = self.attention.o, self.mlp_norm, self.mlp
        gate = (None, None) if m.gate is None else (m.gate.weight, m.gate.bias)
        mlp = *gate, m.up.weight, m.up.bias, m.down.weight, m.down.bias
        return o.weight, o.bias, norm.weight, getattr(norm, "bias", None), *mlp

    def attention_options(self, seeds: Tensor | None) -> dict[str, Any]:
        options: dict[str, Any] = dict(self.attention.options)
        if self.attention.sinks is not None:
            options["sinks"] = self.attention.sinks
        if seeds is not None:
            options.update(dropout=self.attention.dropout, seed=seeds)
        return options


class SelfAttention(nn.Module):
    """Weights of the projections and options of attention."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        self.options = dict(softcap=config.softcap) if config.softcap else {}
        self.dropout = config.dropout
        self.q = nn.Linear(config.dim, config.heads * self.head_dim, bias=config.bias)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.bias)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.bias)
        self.o = nn.Linear(config.heads * self.head_dim, config.dim, bias=config.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.sinks else None


class MLP(nn.Module):
    """Weights of SwiGLU, in which one projection gates the other, or of GELU without a gate."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=config.bias) if gated else None
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=config.bias)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=config.bias)


def row_functions(config: Model) -> RowFunctions:
    """Return a layer's two functions of rows. They take weights as arguments, so that one compiled graph serves all layers."""
    width, eps = head_dim(config), config.norm_eps

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if config.norm == "layernorm":
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def project(
        x: Tensor,  # (B, n, dim)
        cos: Tensor | None,
        sin: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        q_weight: Tensor,
        q_bias: Tensor | None,
        k_weight: Tensor,
        k_bias: Tensor | None,
        v_weight: Tensor,
        v_bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, n, H, D) each
        x = norm(x, norm_weight, norm_bias)
        pairs = ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
        q, k, v = (F.linear(x, weight, bias).unflatten(-1, (-1, width)) for weight, bias in pairs)
        if q_norm is not None and k_norm is not None:
            q, k = F.rms_norm(q, q_norm.shape, q_norm, eps), F.rms_norm(k, k_norm.shape, k_norm, eps)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def expand(
        x: Tensor,  # (B, n, dim)
        out: Tensor,  # (B, n, H, D)
        o_weight: Tensor,
        o_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        gate_weight: Tensor | None,
        gate_bias: Tensor | None,
        up_weight: Tensor,
        up_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # (B, n, dim) and (B, n, mlp_dim)
        hidden = x + F.linear(out.flatten(-2), o_weight, o_bias)
        x = norm(hidden, norm_weight, norm_bias)
        up = F.linear(x, up_weight, up_bias)
        return hidden, gelu(up) if gate_weight is None else swiglu(F.linear(x, gate_weight, gate_bias), up)

    def finish(x: Tensor, out: Tensor, *weights: Any) -> Tensor:  # (B, n, dim)
        *others, down_weight, down_bias = weights
        hidden, inner = expand(x, out, *others)
        return hidden + F.linear(inner, down_weight, down_bias)

    return RowFunctions(project, finish, expand)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D / 2]) by its angle, so that q · k depends only on the distance of the two tokens.

    Pairs are taken from the two halves, as in Hugging Face's Llama, so that its weights need no permutation.

    Args:
        x: (B, S, H, D).
        cos: (B or 1, S, 1, D / 2).
        sin: the same shape.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def new_norm(config: Model, dim: int) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(dim, config.norm_eps, bias=config.bias)
    return nn.RMSNorm(dim, config.norm_eps)
