"""One GPU: attention as a definition, then as fast code. Knows nothing of ranks or models.

    from kernels import attention, Mask, linear_cross_entropy

`mask` says who sees whom, `reference` what attention is, `chunked` and `triton_*` how it is computed, `attention` is the one
operator over them, and `blocks` is the same cut into blocks of keys, which is what a ring passes round; `block` says what
one is to a backend. `sums` adds up what comes home in a ring's backward. `paged` is for models that write: single queries over
keys in pages.
"""

from .attention import attention
from .blocks import adds_in_memory, block_backward, block_forward, output_delta
from .loss import linear_cross_entropy
from .mask import Mask
from .paged import paged_attention
from .segments import Segment
from .sums import Summand, sum_gradients

__all__ = [
    "Mask",
    "Segment",
    "Summand",
    "adds_in_memory",
    "attention",
    "block_backward",
    "block_forward",
    "linear_cross_entropy",
    "output_delta",
    "paged_attention",
    "sum_gradients",
]
