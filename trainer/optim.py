"""AdamW, and a learning rate that is a function of the step, so that there is no scheduler whose state could be lost."""

import math

import torch
from torch import nn


def adamw(model: nn.Module, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """Matrices decay and norms do not: a norm's scale has no reason to be small. The loop sets the learning rate."""
    weights = list(model.parameters())
    groups = [
        dict(params=[w for w in weights if w.ndim >= 2], weight_decay=weight_decay),
        dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Up in a line over the warmup, then down half a cosine to floor · peak at the last step. Steps count from 1."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
