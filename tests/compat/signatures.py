"""Signatures of the packages that ringspan.compat imitates, recorded from their sources, without type annotations.

`make hosts` compares them with the installed packages, so that a changed interface is one line that names both versions.
"""

import inspect
from collections.abc import Callable
from typing import Any

FLASH_ATTN = {  # flash_attn 2.8.3
    "flash_attn_func": "(q, k, v, {options})",
    "flash_attn_kvpacked_func": "(q, kv, {options})",
    "flash_attn_qkvpacked_func": "(qkv, {options})",
    "flash_attn_varlen_func": "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {options}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": "(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {options})",
    "flash_attn_varlen_qkvpacked_func": "(qkv, cu_seqlens, max_seqlen, {options})",
}
FLASH_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
RING_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, group=None"
)
_PREPARED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice"
RING_FLASH_ATTN = {  # ring-flash-attn 0.1.8
    "llama3_flash_attn_prepare_cu_seqlens": "(cu_seqlens, causal, rank, world_size)",
    "llama3_flash_attn_varlen_func": f"(q, k, v, {_PREPARED}, {{options}})",
    "llama3_flash_attn_varlen_kvpacked_func": f"(q, kv, {_PREPARED}, {{options}})",
    "llama3_flash_attn_varlen_qkvpacked_func": f"(qkv, {_PREPARED}, {{options}})",
    "ring_flash_attn_func": "(q, k, v, {options})",
    "ring_flash_attn_kvpacked_func": "(q, kv, {options})",
    "ring_flash_attn_qkvpacked_func": "(qkv, {options})",
    "ring_flash_attn_varlen_func": "(q, k, v, cu_seqlens, max_seqlen, {options})",
    "ring_flash_attn_varlen_kvpacked_func": "(q, kv, cu_seqlens, max_seqlen, {options})",
    "ring_flash_attn_varlen_qkvpacked_func": "(qkv, cu_seqlens, max_seqlen, {options})",
    "stripe_flash_attn_func": "(q, k, v, {options})",
    "stripe_flash_attn_kvpacked_func": "(q, kv, {options})",
    "stripe_flash_attn_qkvpacked_func": "(qkv, {options})",
    "substitute_hf_flash_attn": "(process_group, heads_k_stride)",
    "update_ring_flash_attn_params": "(cu_seqlens, process_group)",
    "zigzag_ring_flash_attn_func": "(q, k, v, {options})",
    "zigzag_ring_flash_attn_kvpacked_func": "(q, kv, {options})",
    "zigzag_ring_flash_attn_qkvpacked_func": "(qkv, {options})",
    "zigzag_ring_flash_attn_varlen_func": "(q, k, v, cu_seqlens, max_seqlen, {options})",
    "zigzag_ring_flash_attn_varlen_kvpacked_func": "(q, kv, cu_seqlens, max_seqlen, {options})",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func": "(qkv, cu_seqlens, max_seqlen, {options})",
}


def recorded(signatures: dict[str, str], options: str) -> dict[str, str]:
    """Return the signatures with their common options filled in."""
    return {name: text.format(options=options) for name, text in signatures.items()}


def signature(function: Callable[..., Any]) -> str:
    """Return a function's signature without annotations."""
    plain = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in plain.parameters.values()]
    return str(plain.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
