"""The GPT, in one file: what a token goes through from its embedding to its loss.

    hidden = embedding[tokens]
    each layer:  hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    loss_sum, num_valid = cross-entropy of head(norm(hidden)) against labels

With the options of config.py it is a Llama, a Qwen3 or a GPT-2, whose weights fit (weights.py). `attention` is an argument
with the signature of `kernels.attention`. One that spans ranks fits as well, since all else here treats each token alone; so
does one that remembers keys (generate.py). Nothing in this file knows of ranks.

Three tensors say where tokens are, because only whoever cut the sequence knows: `positions` restart with each document and
are for RoPE; `documents` are ids for the whole sequence, in its natural order and on the CPU, from which each layer's mask is
made, once a batch; `labels` were shifted before the sequence was cut. The loss is in the forward of the module that owns the
head's weight, so that logits never exist, and so that whatever gathers weights for a module's forward has gathered the head.
"""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringspan.kernels.attention import attention
from ringspan.kernels.loss import linear_cross_entropy
from ringspan.kernels.mask import Mask
from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.planning.flops import head_dim, window

Attention = Callable[..., Any]  # (q, k, v, mask=…) -> out, as kernels.attention
Rotation = tuple[Tensor, Tensor]  # cos and sin, (B or 1, S, 1, head_dim / 2)
CHUNK = 2**20  # fresh weights are drawn in pieces of so many numbers, each with a generator of its own


class GPT(nn.Module):
    def __init__(self, config: Model, rope: Rope | None = None, attention: Attention = attention, seed: int | None = 0) -> None:
        """With seed=None the weights are left undrawn, for someone who will fill them."""
        super().__init__()
        check(config, rope or Rope())
        self.config, self.rope, self.attention = config, rope or Rope(), attention
        # How a layer is run: memory.py puts its checkpointing here.
        self.run_layer: Callable[..., Tensor] = lambda layer, *inputs: layer(*inputs)
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_positions, config.dim) if learned else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = new_norm(config, config.dim)
        self.head = Head(config)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.rope_frequencies()
        if seed is not None:
            self.initialise(seed)

    def forward(
        self,
        tokens: Tensor,  # (B, n) of whichever part of the sequence is here, as are labels and positions
        labels: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,  # (S,) or (B, S), of the whole sequence; None: one document
        seeds: Tensor | None = None,  # int64 (B,): what dropout depends on; needed if there is any, while training
        each: bool = False,
    ) -> tuple[Tensor, ...]:
        """The sum of the losses over labels != -100, and their number; with `each` also every token's loss and whether
        its label was the likeliest token, both (B, n) and without gradients."""
        return self.head(self.hidden(tokens, positions, documents, seeds), labels, each)

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        attention: Attention | None = None,
        last: bool = False,
    ) -> Tensor:
        """(B, n, vocabulary), or of the last token alone: for generation. Training never needs them at once."""
        hidden = self.hidden(tokens, positions, documents, attention=attention)
        return self.head(hidden[:, -1:] if last else hidden)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        seeds: Tensor | None = None,
        attention: Attention | None = None,
    ) -> Tensor:
        """What the head sees. `attention` stands in for the model's own for this one call."""
        hidden = self.embedding(tokens)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(positions)
        rotation = self.rotation(positions) if self.config.positions == "rope" else None
        masks = self.masks(documents, hidden.device)
        if not (self.config.dropout and self.training):
            seeds = None
        elif seeds is None:
            raise ValueError(f"seeds=None, but model.dropout={self.config.dropout}: give an int64 tensor, one a sequence")
        for index, layer in enumerate(self.layers):
            mask = masks[window(self.config, index)]
            layer_seeds = None if seeds is None else seeds + (index << 40)  # every layer drops others
            hidden = self.run_layer(layer, hidden, rotation, mask, attention or self.attention, layer_seeds)
        return self.norm(hidden)

    def masks(self, documents: Tensor | None, device: torch.device) -> dict[int, Mask]:
        """The mask of each kind of layer. Its numbers are sent here, so that no layer has to wait, or recompile, for them."""
        kinds = {window(self.config, layer) for layer in range(self.config.layers)}
        masks = {kind: Mask(causal=True, window=kind or None, documents=documents) for kind in kinds}
        for mask in masks.values():
            mask.bounds(device)
        return masks

    def rotation(self, positions: Tensor) -> Rotation:
        """The angles by which rotary positions turn each pair of a head, once for all layers.

        In fp64: an fp32 angle of position 4M is off by up to 0.25, a bf16 one of position 1000 by up to 2.
        """
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions.double()[..., None, None] * self.frequencies  # (…, S, 1, head_dim / 2): one turn for all heads
        dtype = torch.float64 if self.norm.weight.dtype == torch.float64 else torch.float32
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)

    def rope_frequencies(self) -> None:
        """To be called again by whoever built the model on the meta device, or where every new tensor is cast to bf16.

        They are no buffer, because engines cast buffers too, and angles in bf16 are noise.
        """
        self.frequencies, self.rope_scale = frequencies(self.rope, head_dim(self.config))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights: the same for a seed on any device and in any order."""
        for name, weight in self.named_parameters():
            weight.copy_(fresh(name, weight.shape, self.config, seed).view_as(weight))

    def compile_layers(self) -> None:
        for layer in self.layers:
            layer.compile()


class Layer(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = new_norm(config, config.dim)
        self.attention = SelfAttention(config)
        self.mlp_norm = new_norm(config, config.dim)
        self.mlp = MLP(config)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, mask: Mask, attention: Attention, seeds: Tensor | None
    ) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, mask, attention, seeds)
        return hidden + self.mlp(self.mlp_norm(hidden))


class SelfAttention(nn.Module):
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

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Mask, attention: Attention, seeds: Tensor | None) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))  # (B, S, H, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        options: dict[str, Any] = dict(self.options)
        if self.sinks is not None:
            options["sinks"] = self.sinks
        if seeds is not None:
            options.update(dropout=self.dropout, seed=seeds)
        return self.o(attention(q, k, v, mask=mask, **options).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: one projection decides how much of the other passes. GELU has no gate."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=config.bias) if gated else None
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=config.bias)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)) if self.gate is None else swiglu(self.gate(x), self.up(x)))


class Head(nn.Module):
    """From hidden states to the loss; to logits if there are no labels."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.softcap = config.logit_softcap
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.dim))

    def forward(self, hidden: Tensor, labels: Tensor | None = None, each: bool = False) -> Any:
        if labels is not None:
            return linear_cross_entropy(hidden, self.weight, labels, softcap=self.softcap, return_each=each)
        logits = F.linear(hidden, self.weight)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (x[i], x[i + D / 2]) by its angle, so that q · k depends only on how far apart the two stand.

    Halves and not neighbours are a pair, as in Hugging Face's Llama, whose weights so fit as they are.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """How far each pair of a head turns per token (fp64), and a factor for cos and sin.

    linear slows every pair down alike; ntk raises the base so that only slow pairs slow down much (by `factor` the slowest);
    yarn (Peng et al. 2023) and llama3 leave alone the pairs that turn often within the original length, slow down by
    `factor` those that never turn round, and blend in between. yarn also sharpens attention.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    base = rope.base * rope.factor ** (dim / max(dim - 2, 1)) if rope.kind == "ntk" else rope.base
    fast = base**-exponents
    if rope.kind in ("base", "ntk"):
        return fast, 1.0
    slow = fast / rope.factor
    if rope.kind == "linear":
        return slow, 1.0
    if rope.kind == "llama3":
        turns = rope.original_length * fast / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return slow + (fast - slow) * keep, 1.0
    # The index of the pair that turns so many times within the original length.
    low, high = (
        dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    drop = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return fast + (slow - fast) * drop, rope.attention_factor or 0.1 * math.log(rope.factor) + 1


def fresh(name: str, shape: torch.Size, config: Model, seed: int, start: int = 0, stop: int | None = None) -> Tensor:
    """The elements start … stop - 1 of a fresh weight, in fp32 on the CPU: a rank that owns a part draws only that part.

    They depend on the seed and the weight's name alone. GPT-2's scale: every layer adds twice to the residual stream, whose
    variance is to stay what it was.
    """
    stop = math.prod(shape) if stop is None else stop
    if name.endswith(("bias", "sinks")):
        return torch.zeros(stop - start)
    if "norm" in name:
        return torch.ones(stop - start)
    std = config.init_std * ((2 * config.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0)
    out = torch.empty(stop - start)

    def draw(first: int) -> None:
        digest = hashlib.blake2b(f"{seed}/{name}/{first // CHUNK}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        piece = torch.empty(min(CHUNK, math.prod(shape) - first)).normal_(std=std, generator=generator)
        a, b = max(first, start), min(first + CHUNK, stop)
        out[a - start : b - start] = piece[a - first : b - first]

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # two billion numbers take half a minute in one thread
        list(pool.map(draw, range(start - start % CHUNK, stop, CHUNK)))
    return out


def new_norm(config: Model, dim: int) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(dim, config.norm_eps, bias=config.bias)
    return nn.RMSNorm(dim, config.norm_eps)


def check(config: Model, rope: Rope) -> None:
    problems = [*validate.shape(config), *validate.rotary(rope)]
    if config.vocabulary < 1:
        problems.append(f"model.vocabulary={config.vocabulary}: it must be at least 1 once the tokenizer is known")
    if config.positions == "learned" and config.max_positions < 1:
        problems.append(f"model.max_positions={config.max_positions}: learned positions need at least 1")
    if problems:
        raise ValueError("; ".join(problems))
