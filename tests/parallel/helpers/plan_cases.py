"""Masks of a sequence of 31 tokens, and numbers of blocks per step, for tests of layouts and plans."""

import torch

from ringspan import Layout, Mask
from ringspan.parallel.transport.select import blocks_per_step

LENGTH = 31
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=5),
    "window-wide": Mask(causal=True, window=17),
    "window-both": Mask(window=(3, 6)),
    "window-1": Mask(window=1),
    "prefix": Mask(causal=True, prefix=9),
    "prefix-batch": Mask(causal=True, prefix=torch.tensor([2, 20])),
    "documents": Mask(causal=True, documents=torch.tensor([0] * 7 + [1] * 14 + [-1] * 5 + [2] * 5)),
    "documents-full": Mask(documents=torch.tensor([3] * 16 + [1] * 15)),
    "documents-batch": Mask(causal=True, documents=torch.tensor([[0] * 31, [1] * 10 + [-1] * 21])),
    "all-padding": Mask(documents=torch.full((31,), -1)),
}


def one_per_step(ranks: int) -> tuple[int, ...]:
    return ()


def halving(ranks: int) -> tuple[int, ...]:
    """Steps of `copy`."""
    return blocks_per_step("copy", Layout("zigzag", ranks, ranks), True, 1, 8)


def single_step(ranks: int) -> tuple[int, ...]:
    return blocks_per_step("copy_all", Layout("zigzag", ranks, ranks), True, 1, 8)
