"""The public functions of ring-flash-attn 0.1.8, run by Ringspan's ring; `install` lets other packages import them.

    function of ring-flash-attn              shard of rank r of P
    ring_flash_attn_…                        the r-th of P parts
    zigzag_ring_flash_attn_…                 chunks r and 2P−1−r of 2P
    stripe_flash_attn_…                      tokens r, r + P, …
    ring_flash_attn_varlen_…                 the r-th part of each document
    zigzag_ring_flash_attn_varlen_…          chunks r and 2P−1−r of each document
    llama3_flash_attn_varlen_…               the r-th part of the packed sequence

Each comes as func (q, k, v), kvpacked_func (q, kv) and qkvpacked_func (qkv). Windows and dropout, which ring-flash-attn lacks,
are exact. alibi_slopes raises.
"""

from ringspan.compat.ring_flash_attn.adapters import substitute_hf_flash_attn, update_ring_flash_attn_params
from ringspan.compat.ring_flash_attn.batch import (
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)
from ringspan.compat.ring_flash_attn.install import install
from ringspan.compat.ring_flash_attn.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from ringspan.compat.ring_flash_attn.varlen import (
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "install",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
