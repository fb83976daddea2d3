"""What a training step costs in floating-point operations, by the convention that the project's numbers use.

A weight of a matrix product costs 2 operations per token forward and 4 backward. A head of attention costs, for
each pair of a query and a key that it sees, 4 · D forward and 2.5 times that backward, which has five products for the
forward's two. The embedding is a look-up and counts nothing; nor does what runs again in the backward to save memory.
"""

import torch

from kernels import Mask

from .model import GPTConfig


def training_flops(config: GPTConfig, tokens: torch.Size, mask: Mask) -> float:
    """Forward and backward of tokens of this shape (B, S)."""
    attention = config.dim * config.head_dim * (2 * config.heads + 2 * config.kv_heads)  # q and o; k and v
    weights = config.layers * (attention + 3 * config.dim * config.mlp_dim) + config.dim * config.vocabulary
    pairs = visible_pairs(mask, *tokens)
    return 6 * weights * tokens.numel() + 3.5 * 4 * config.layers * config.heads * config.head_dim * pairs


def visible_pairs(mask: Mask, batch: int, length: int) -> int:
    """How many (query, key) pairs the mask lets through, in the whole batch."""
    lo, hi = mask.interval(torch.arange(length), num_keys=length)
    return int((hi - lo + 1).clamp(min=0).expand(batch, length).sum())
