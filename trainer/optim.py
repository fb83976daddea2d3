"""AdamW, and a learning rate that is a function of the step: no scheduler, whose state could be lost."""

import math
from dataclasses import dataclass

import torch
from torch import nn

WARMUP, MAX_WARMUP = 0.1, 1000  # a tenth of the steps, and at most so many: AdamW's averages know no more by then
FLOOR = 0.1  # of the peak, at the last step


@dataclass(frozen=True)
class Cosine:
    """The learning rate of each step, counted from 1: straight up to the peak, then down half a cosine to a tenth."""

    steps: int
    peak: float

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: it must be at least 1")
        if not 0 < self.peak < math.inf:  # NaN fails too
            raise ValueError(f"lr={self.peak}: it must be a number above 0, such as 1e-3")

    def __call__(self, step: int) -> float:
        warmup = min(MAX_WARMUP, math.ceil(WARMUP * self.steps))
        if step <= warmup:
            return self.peak * step / warmup
        done = (step - warmup) / (self.steps - warmup)
        return self.peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)


def adamw(model: nn.Module, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """Matrices decay and norms do not: a norm's scale has no reason to be small. The loop sets the learning rate."""
    weights = list(model.parameters())
    groups = [
        dict(params=[w for w in weights if w.ndim >= 2], weight_decay=weight_decay),
        dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
