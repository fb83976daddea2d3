"""The GPT: the path of a token from its embedding to its loss.

    hidden = embedding[tokens]
    each layer:  hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    loss_sum, num_valid = cross-entropy of head(norm(hidden)) against labels

The options of config/schema.py make it a Llama, a Qwen3 or a GPT-2 that loads their weights (checkpoint/huggingface.py).
`attention` is an argument with the signature of `ringspan.attention`. A ring fits, because everything else treats each token
alone; so does a KV cache (kv_cache.py). This file knows nothing of ranks: the caller splits the sequence and passes
`positions`, which restart per document (RoPE), `documents`, ids of the full sequence in natural order on the CPU (masks, made
once per batch), and `labels`, shifted before the split. The loss is part of the forward of the module that owns the head's
weight. The logits never exist at once, and ZeRO 3 has gathered the weight by then.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringspan.kernels import attention as one_device
from ringspan.kernels.loss import linear_cross_entropy
from ringspan.kernels.mask import Mask
from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Model, Rope
from ringspan.trainer.layer import Attention, Layer, Rotation, new_norm, row_functions
from ringspan.trainer.memory.streamed import LayerInputs, Streaming
from ringspan.trainer.monitoring.layer_boundaries import cross_layer_boundary
from ringspan.trainer.planning.flops import head_dim, window

CHUNK = 2**20  # elements of an initial weight per random generator


class GPT(nn.Module):
    """A GPT language model.

    Args:
        config: shape of the model.
        rope: rotary positions; None: the default ones.
        attention: attention function of all layers.
        seed: of the initial weights; None leaves them uninitialised.

    Raises:
        ValueError: the config has no valid shape.
    """

    frequencies: Tensor  # fp64 (head_dim / 2,)
    unscaled_frequencies: Tensor  # the same shape, of layers with a window under rope.layers=full
    rope_scale: float

    def __init__(
        self, config: Model, rope: Rope | None = None, attention: Attention = one_device.attention, seed: int | None = 0
    ) -> None:
        super().__init__()
        _validate(config, rope or Rope())
        self.config, self.rope, self.attention = config, rope or Rope(), attention
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_positions, config.dim) if learned else None
        functions = row_functions(config)
        self.layers = nn.ModuleList(Layer(config, functions) for _ in range(config.layers))
        self.segments = nn.ModuleList(Segment([layer], [index]) for index, layer in enumerate(self.layers))
        self.norm = new_norm(config, config.dim)
        self.head = Head(config)
        if config.tied:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]  # torch types Embedding.weight as a Tensor
        self.set_rope_frequencies()
        if seed is not None:
            self.initialize(seed)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        seeds: Tensor | None = None,
        each: bool = False,
    ) -> tuple[Tensor, ...]:
        """Compute the loss of this rank's part of the sequence.

        Args:
            tokens: int64 (B, n), this rank's part of the sequence.
            labels: int64 (B, n); -100 is ignored.
            positions: int64 (B, n).
            documents: (S,) or (B, S), document ids of the full sequence; None: one document.
            seeds: int64 (B,), seeds of dropout; needed while training if model.dropout is above 0.
            each: also return the losses and hits of all tokens.

        Returns:
            The sum of the losses over labels != -100, and their number. With `each` also every token's loss, and whether its
            label was the most likely token; both (B, n), without gradients.
        """
        return self.head(self.hidden(tokens, positions, documents, seeds), labels, each)

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        attention: Attention | None = None,
        last: bool = False,
    ) -> Tensor:
        """Return the logits (B, n, vocabulary), with `last` only those of the last token. Training never materialises them."""
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
        """Return the head's input (B, n, dim). `attention` replaces the model's own for this call."""
        hidden = self.embedding(tokens)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(positions)
        rope = self.config.positions == "rope"
        rotation = self.rotation(positions) if rope else None
        unscaled = self.rotation(positions, scaled=False) if rope and self.rope.layers == "full" else rotation
        masks = self.masks(documents, hidden.device)
        if not (self.config.dropout and self.training):
            seeds = None
        elif seeds is None:
            raise ValueError(
                f"seeds=None, but model.dropout={self.config.dropout}: pass an int64 tensor with one seed per sequence"
            )
        inputs = []
        for index in range(self.config.layers):
            size = window(self.config, index)
            own = None if seeds is None else seeds + (index << 40)  # another dropout pattern in every layer
            inputs.append(LayerInputs(unscaled if size else rotation, masks[size], own, index))
        for segment in self.segments:
            hidden = segment(hidden, inputs, attention or self.attention)
        return self.norm(hidden)

    def masks(self, documents: Tensor | None, device: torch.device) -> dict[int, Mask]:
        """Return the mask of each window size, its bounds on `device`, so that no layer synchronises or recompiles for them."""
        if (
            documents is not None
            and documents.device.type == "cpu"
            and bool((documents == documents[..., :1].clamp(min=0)).all())
        ):
            documents = None  # one document per sequence: kernels without documents are faster
        sizes = {window(self.config, layer) for layer in range(self.config.layers)}
        masks = {size: Mask(causal=True, window=size or None, documents=documents) for size in sizes}
        for mask in masks.values():
            mask.bounds(device)
        return masks

    def rotation(self, positions: Tensor, scaled: bool = True) -> Rotation:
        """Return cos and sin of the rotary angles, once for all layers with scaled frequencies, or for all without.

        The angles are in fp64: an fp32 angle of position 4M is off by up to 0.25, a bf16 one of position 1000 by up to 2.
        """
        self.frequencies = self.frequencies.to(positions.device)
        self.unscaled_frequencies = self.unscaled_frequencies.to(positions.device)
        rates, scale = (self.frequencies, self.rope_scale) if scaled else (self.unscaled_frequencies, 1.0)
        angles = positions.double()[..., None, None] * rates  # (…, S, 1, head_dim / 2), equal for all heads
        dtype = torch.float64 if self.norm.weight.dtype == torch.float64 else torch.float32
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def set_rope_frequencies(self) -> None:
        """Compute the rotary frequencies.

        Call it again after building the model on the meta device or under a context that casts new tensors to bf16. The
        frequencies are not a buffer, because engines cast buffers, and bf16 angles are noise.
        """
        self.frequencies, self.rope_scale = frequencies(self.rope, head_dim(self.config))
        self.unscaled_frequencies, _ = frequencies(Rope(base=self.rope.base), head_dim(self.config))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the initial weights. They depend on the seed alone, not on the device or the order of the weights."""
        for name, weight in self.named_parameters():
            weight.copy_(initial_values(name, weight.shape, self.config, seed).view_as(weight))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the weights; those of layers once, under `layers`."""
        with self._without_segments():
            return super().state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load weights that `state_dict` returned."""
        with self._without_segments():
            return super().load_state_dict(*args, **options)

    @contextlib.contextmanager
    def _without_segments(self) -> Iterator[None]:
        segments = self._modules.pop("segments")
        try:
            yield
        finally:
            self._modules["segments"] = segments

    def compile_layers(self) -> None:
        for layer in self.layers:
            layer.compile()

    def stream(self, streaming: Streaming) -> None:
        """Run the layers by a memory plan; before an engine takes the model."""
        groups = streaming.plan.segments(self.config.layers)
        self.segments = nn.ModuleList(Segment([self.layers[i] for i in group], list(group), streaming) for group in groups)


class Segment(nn.Module):
    """Consecutive layers that keep one input. DeepSpeed's ZeRO 3 gathers the weights of a segment at a time."""

    def __init__(self, layers: list[nn.Module], indices: list[int], streaming: Streaming | None = None) -> None:
        super().__init__()
        self.layers, self.indices, self.streaming = nn.ModuleList(layers), indices, streaming

    def forward(self, hidden: Tensor, inputs: list[LayerInputs], attention: Attention) -> Tensor:
        """`inputs` are those of all layers of the model. Another attention than the streaming's own runs layer by layer."""
        own = [inputs[index] for index in self.indices]
        if self.streaming is not None and attention is self.streaming.attention:
            return self.streaming.run(list(self.layers), own, hidden)
        for layer, each in zip(self.layers, own, strict=True):
            cross_layer_boundary(hidden.device)
            if hidden.requires_grad:
                hidden.register_hook(_cross_in_backward)
            hidden = layer(hidden, each.rotation, each.mask, attention, each.seeds)
        return hidden


class Head(nn.Module):
    """Hidden states to the loss, or to logits without labels."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.softcap = config.logit_softcap
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.dim))

    def forward(self, hidden: Tensor, labels: Tensor | None = None, each: bool = False) -> Any:
        if labels is not None:
            return linear_cross_entropy(hidden, self.weight, labels, softcap=self.softcap, return_each=each)
        logits = F.linear(hidden, self.weight)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def _cross_in_backward(gradient: Tensor) -> None:
    cross_layer_boundary(gradient.device)


def frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """Return the angle per token of each pair of a head, fp64 (dim / 2,), and a factor for cos and sin.

    linear divides all frequencies by `factor`. ntk raises the base, so that mainly slow pairs slow down, the slowest by
    `factor`. yarn (Peng et al. 2023) and llama3 keep the pairs that rotate often within the original length, divide the
    frequencies of those that never complete a rotation by `factor`, and interpolate in between. yarn also sharpens attention.
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
        rotations = rope.original_length * fast / (2 * math.pi)
        keep = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return slow + (fast - slow) * keep, 1.0
    # Index of the pair that rotates this many times within the original length.
    low, high = (
        dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    drop = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return fast + (slow - fast) * drop, rope.attention_factor or 0.1 * math.log(rope.factor) + 1


def initial_values(name: str, shape: torch.Size, config: Model, seed: int, start: int = 0, stop: int | None = None) -> Tensor:
    """Return elements start … stop - 1 of an initial weight, flat, in fp32 on the CPU.

    A rank that owns a part draws only that part: the values depend on the seed, the name and the index alone. The scale is
    GPT-2's: every layer adds to the residual stream twice, and the stream's variance should not grow with depth.
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
        chunk = torch.empty(min(CHUNK, math.prod(shape) - first)).normal_(std=std, generator=generator)
        a, b = max(first, start), min(first + CHUNK, stop)
        out[a - start : b - start] = chunk[a - first : b - first]

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # two billion elements take half a minute in one thread
        list(pool.map(draw, range(start - start % CHUNK, stop, CHUNK)))
    return out


def _validate(config: Model, rope: Rope) -> None:
    problems = [*validate.validate_shape(config), *validate.validate_rope(rope)]
    if config.vocabulary < 1:
        problems.append(f"model.vocabulary={config.vocabulary}: it must be at least 1 once the tokenizer is known")
    if config.positions == "learned" and config.max_positions < 1:
        problems.append(f"model.max_positions={config.max_positions}: learned positions need at least 1")
    if problems:
        raise ValueError("; ".join(problems))
