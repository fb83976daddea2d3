"""Exact attention over sequences that no single GPU can hold: Triton FlashAttention kernels composed with ring attention.

    from ringspan import Mask, attention                                    one GPU
    from ringspan import Layout, Mesh, context_attention, ring_attention    many GPUs

The public names are imported on first use, so that `import ringspan` loads no torch. The sub-packages are `kernels` (one GPU),
`parallel` (many GPUs), `trainer` (training runs), `launch` (starting ranks) and `conf` (Hydra configs).
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspan.kernels.attention import attention as attention
    from ringspan.kernels.loss import linear_cross_entropy as linear_cross_entropy
    from ringspan.kernels.mask import Mask as Mask
    from ringspan.kernels.paged_attention import paged_attention as paged_attention
    from ringspan.kernels.varlen import attention_varlen as attention_varlen
    from ringspan.parallel.context_attention import context_attention as context_attention
    from ringspan.parallel.layout import Layout as Layout
    from ringspan.parallel.mesh import Mesh as Mesh
    from ringspan.parallel.ring_attention import ring_attention as ring_attention
    from ringspan.parallel.ring_attention_varlen import ring_attention_varlen as ring_attention_varlen

__version__ = "0.1.0"
ROOT = Path(__file__).resolve().parent.parent  # the folder that this package is imported from: a checkout or site-packages

_MODULES = {
    "Layout": "ringspan.parallel.layout",
    "Mask": "ringspan.kernels.mask",
    "Mesh": "ringspan.parallel.mesh",
    "attention": "ringspan.kernels.attention",
    "attention_varlen": "ringspan.kernels.varlen",
    "context_attention": "ringspan.parallel.context_attention",
    "linear_cross_entropy": "ringspan.kernels.loss",
    "paged_attention": "ringspan.kernels.paged_attention",
    "ring_attention": "ringspan.parallel.ring_attention",
    "ring_attention_varlen": "ringspan.parallel.ring_attention_varlen",
}
__all__ = [  # literal for type checkers; a test compares it with _MODULES
    "Layout",
    "Mask",
    "Mesh",
    "attention",
    "attention_varlen",
    "context_attention",
    "linear_cross_entropy",
    "paged_attention",
    "ring_attention",
    "ring_attention_varlen",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ringspan' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
