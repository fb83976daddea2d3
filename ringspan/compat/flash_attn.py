"""The functions of flash_attn 2 on one GPU: `from ringspan.compat.flash_attn import flash_attn_func`.

    batched   q (B, S, Hq, D), k and v (B, Sk, Hkv, D)         qkv (B, S, 3, H, D)    kv (B, Sk, 2, Hkv, D)
    packed    q (T, Hq, D), k and v (Tk, Hkv, D), boundaries   qkv (T, 3, H, D)       kv (Tk, 2, Hkv, D)

window_size is (left, right), and −1 is no bound. With a causal mask or a window, the last query is at the last key. With
return_attn_probs a call returns (out, lse, None): lse is (B, Hq, S), packed (Hq, T). alibi_slopes and block_table raise.
max_seqlen has no effect, because the boundaries contain it. Dropout has another pattern than flash_attn's.
"""

from typing import Any

from torch import Tensor

from ringspan.compat.options import as_flash_result, as_window, pad_width, score_options, split_packed
from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.kernels.varlen import attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn.flash_attn_func`.

    Args:
        q: (B, S, Hq, D).
        k: (B, Sk, Hkv, D).
        v: (B, Sk, Hkv, D).
        dropout_p: Probability of dropping an attention weight.
        softmax_scale: Factor of the scores; None is D ** −0.5.
        causal: Let a query attend to no later key.
        window_size: (left, right); −1 is no bound.
        softcap: Cap of the scores; 0 is none.
        alibi_slopes: None.
        deterministic: Make gradients equal bit for bit in every run.
        return_attn_probs: Return (out, lse, None).

    Returns:
        out (B, S, Hq, D), and with `return_attn_probs` lse (B, Hq, S) and None.

    Raises:
        ValueError: An option is not supported, or a tensor does not fit.
    """
    options = score_options(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic, return_attn_probs)
    result: Any = attention(*pad_width(q, k, v, options), Mask(bool(causal), as_window(window_size)), **options)
    return as_flash_result(result, v.shape[-1])


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of q (B, S, Hq, D) and kv (B, Sk, 2, Hkv, D)."""
    options: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, *split_packed("kv", kv, 2, 2), *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of qkv (B, S, 3, H, D)."""
    options: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(*split_packed("qkv", qkv, 2, 3), *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Compute `flash_attn.flash_attn_varlen_func`.

    Args:
        q: (T, Hq, D), all documents one after another.
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, D).
        cu_seqlens_q: (documents + 1,) int32 boundaries of the queries.
        cu_seqlens_k: (documents + 1,) int32 boundaries of the keys.
        max_seqlen_q: No effect.
        max_seqlen_k: No effect.
        dropout_p: Probability of dropping an attention weight.
        softmax_scale: Factor of the scores; None is D ** −0.5.
        causal: Let a query attend to no later key.
        window_size: (left, right); −1 is no bound.
        softcap: Cap of the scores; 0 is none.
        alibi_slopes: None.
        deterministic: Make gradients equal bit for bit in every run.
        return_attn_probs: Return (out, lse, None).
        block_table: None.

    Returns:
        out (T, Hq, D), and with `return_attn_probs` lse (Hq, T) and None.

    Raises:
        ValueError: An option is not supported, or a tensor does not fit.
    """
    if block_table is not None:
        raise ValueError("block_table: not supported here; ringspan.paged_attention decodes over keys in pages")
    options = score_options(dropout_p, softmax_scale, softcap, alibi_slopes, deterministic, return_attn_probs)
    options |= dict(causal=bool(causal), window=as_window(window_size))
    result: Any = attention_varlen(*pad_width(q, k, v, options), cu_seqlens_q, cu_seqlens_k, **options)
    return as_flash_result(result, v.shape[-1])


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_varlen_func` of q (T, Hq, D) and kv (Tk, 2, Hkv, D)."""
    lengths: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, *split_packed("kv", kv, 1, 2), *lengths, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_varlen_func` of qkv (T, 3, H, D), with the same boundaries for queries and keys."""
    lengths: Any = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*split_packed("qkv", qkv, 1, 3), *lengths, *options)
