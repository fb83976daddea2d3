"""`attention_varlen`: attention over packed sequences, (tokens, heads, head dim), whose boundaries are cu_seqlens.

    cu_seqlens = [0, 3, 3, 8]       documents of 3, 0 and 5 tokens, one after another in 8 rows

A packed batch is one sequence with a document mask. It takes the kernels and the operator of `attention`, and the number of
launches does not depend on the number of documents. The mask's tables are computed from the boundaries on their device, once
for all layers: masks of lists and CPU tensors are cached by value, others while their tensor is alive and unchanged.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ringspan.kernels.attention import attention
from ringspan.kernels.document_tables import joint_tables_from_boundaries, tables_from_boundaries
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import POSITION_LIMIT
from ringspan.kernels.tensors import can_read
from ringspan.kernels.validate import check_tensor


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    *,
    return_lse: Literal[True],
    deterministic: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention within each document of a packed batch. Differentiable.

    Boundaries on a GPU are not read by the host. If they are not valid, a device-side assertion fails.

    Args:
        q: Queries of all documents, (T, Hq, D). Dtypes and head dims as in `attention`.
        k: Keys, (Tk, Hkv, D), in q's dtype. Hq is a multiple of Hkv.
        v: Values, (Tk, Hkv, Dv), in q's dtype.
        cu_seqlens_q: Boundaries of the documents, (documents + 1,), from 0 to T: document d has rows cu_seqlens_q[d] to
            cu_seqlens_q[d + 1] − 1. An int32 tensor on the CPU or on q's device, or a list of ints. Length 0 is allowed.
        cu_seqlens_k: Boundaries of the keys, from 0 to Tk, if they differ. The last query of a document is then at the
            position of its last key. None, or the same object as cu_seqlens_q: queries and keys are the same tokens.
        causal: Let a query attend to no later key.
        window: An int w ≥ 1 lets a query attend to keys within w − 1 positions; a pair (left, right) of ints ≥ 0 to keys from
            `left` positions before to `right` after it. None: no window.
        scale: Factor of the scores. None: D ** −0.5.
        softcap: Bound the scores: s ← softcap · tanh(s / softcap). 0: off.
        sinks: (Hq,) floats: for each query head, the score of one extra key whose value is 0.
        dropout: Probability, in [0, 1), that an attention weight is set to 0; the others are divided by 1 − dropout. Its
            coordinates are rows of the packed batch, not positions within documents.
        seed: Seed of the dropout pattern: an int of 64 bits or an int64 tensor of shape (). None: drawn from torch's generator.
        return_lse: Also return lse.
        deterministic: Compute bit-equal gradients in every run. Only `hopper` has another, faster order.
        backend: "auto", "reference", "chunked", "triton" or "hopper".

    Returns:
        out, (T, Hq, Dv), in q's dtype. With `return_lse` a pair (out, lse): lse, (Hq, T), is the natural logarithm of the
        softmax's denominator, sinks included, in fp32 (fp64 for fp64 inputs), and differentiable. A query without visible keys
        has out 0 and lse = its sink, or −inf without sinks.

    Raises:
        ValueError: An argument has a wrong type, shape, dtype, device or value. The message names it and says what works.

    Example:
        >>> out = attention_varlen(q, k, v, cu_seqlens, window=4096)  # q (T, Hq, D)
    """
    check_packed(q=q, k=k, v=v)
    keys = None
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        keys = Boundaries("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    elif len(q) != len(k):
        raise ValueError(f"q has {len(q)} tokens and k has {len(k)}: pass the boundaries of the keys as cu_seqlens_k")
    mask = packed_mask(Boundaries("cu_seqlens_q", cu_seqlens_q, q.shape[0]), keys, q, causal, window)
    result: Any = attention(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        seed=seed,
        return_lse=return_lse,
        deterministic=deterministic,
        backend=backend,
    )
    return (result[0].squeeze(0), result[1].squeeze(0)) if return_lse else result.squeeze(0)


def check_packed(**inputs: Any) -> None:
    """Validate that packed tensors have three dimensions."""
    for name, x in inputs.items():
        check_tensor(name, x)
        if x.ndim != 3:
            raise ValueError(f"{name} has {x.ndim} dimensions {tuple(x.shape)}; packed, it must be (tokens, heads, head dim)")


class Boundaries(NamedTuple):
    """cu_seqlens of one tensor."""

    name: str  # of the argument
    values: Tensor | Sequence[int]
    num_tokens: int


def packed_mask(
    queries: Boundaries,
    keys: Boundaries | None,
    q: Tensor,
    causal: bool,
    window: int | tuple[int, int] | None,
) -> Mask:
    """Return the mask of a packed batch, from a cache if it has been made before.

    Args:
        queries: Boundaries of the queries.
        keys: Boundaries of the keys, if they differ.
        q: The queries, or a shard of them, for their device.
        causal: As in `Mask`.
        window: As in `Mask`.

    Raises:
        ValueError: The boundaries, `causal` or `window` are not valid.
    """
    rules = Mask(causal, window)
    for each in (queries,) if keys is None else (queries, keys):
        _check_form(each, q.device)
    q_numbers, k_numbers = _host_numbers(queries), None if keys is None else _host_numbers(keys)
    if keys is not None:
        if len(queries.values) != len(keys.values):
            raise ValueError(
                f"{keys.name} has {len(keys.values)} boundaries, {queries.name} has {len(queries.values)}: they bound the same "
                "documents; a document without keys or without queries has length 0"
            )
        if (q_numbers is None) != (k_numbers is None):
            raise ValueError(
                f"{queries.name} and {keys.name} must be both on the host, as lists or CPU tensors, or both on {q.device}"
            )
    is_traced = torch.compiler.is_compiling() or isinstance(q, FakeTensor)  # the caches must not keep a tracer's tensors
    if q_numbers is None:
        return _mask_on_device(queries, queries if keys is None else keys, rules, is_traced)
    make = _mask_on_host.__wrapped__ if is_traced else _mask_on_host
    return make(q_numbers, k_numbers or q_numbers, causal, tuple(window) if isinstance(window, list) else window)


def _check_form(boundaries: Boundaries, device: torch.device) -> None:
    """Validate everything but the numbers."""
    name, values, num_tokens = boundaries
    if num_tokens >= POSITION_LIMIT // 2:
        raise ValueError(f"{name}: {num_tokens} tokens are too many for one packed batch; fewer than 2**28 work")
    if not isinstance(values, Tensor):
        if not isinstance(values, list | tuple) or not all(type(n) is int for n in values):
            raise ValueError(f"{name}={values!r} must be an int32 tensor of shape (documents + 1,) or a list of ints")
        return
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: it must be (documents + 1,)")
    if values.dtype != torch.int32:
        raise ValueError(f"{name} is {values.dtype}; int32 works: {name}.int()")
    if values.device != device and values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}, but q is on {device}: move it there, or to the CPU")


def _host_numbers(boundaries: Boundaries) -> tuple[int, ...] | None:
    """Validate boundaries that the host can read and return them; None for those on another device or of a compiler."""
    name, values, num_tokens = boundaries
    if not isinstance(values, Tensor):
        return _validated_numbers(name, tuple(values), num_tokens)
    if not can_read(values):
        return None
    return _validated_numbers(name, tuple(values.tolist()), num_tokens)


def _validated_numbers(name: str, boundaries: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    if not boundaries or boundaries[0] != 0:
        raise ValueError(f"{name}={shortened(boundaries)}: the first boundary must be 0, the first document's first token")
    for index, (start, end) in enumerate(pairwise(boundaries)):
        if end < start:
            raise ValueError(f"{name}[{index + 1}]={end} is below {name}[{index}]={start}: boundaries must not decrease")
    if boundaries[-1] != num_tokens:
        raise ValueError(f"{name}={shortened(boundaries)}: the last boundary must be {num_tokens}, the number of tokens")
    return boundaries


def shortened(boundaries: tuple[int, ...]) -> str:
    """Return the boundaries for an error message, without those in the middle of a long list."""
    return str(list(boundaries)) if len(boundaries) <= 8 else f"[{boundaries[0]}, {boundaries[1]}, …, {boundaries[-1]}]"


@lru_cache(maxsize=8)  # layers of a step differ in their windows; a mask keeps two int32 per token on host and device
def _mask_on_host(
    q_boundaries: tuple[int, ...],
    k_boundaries: tuple[int, ...],
    causal: bool,
    window: int | tuple[int, int] | None,
) -> Mask:
    """Return a mask with tables on the CPU, which a ring's plan can read."""
    with torch.inference_mode(False):  # autograd cannot save an inference tensor for a backward
        queries = torch.tensor(q_boundaries, dtype=torch.int32, device="cpu")
        keys = queries if k_boundaries == q_boundaries else torch.tensor(k_boundaries, dtype=torch.int32, device="cpu")
        return _make_mask(queries, keys, q_boundaries[-1], k_boundaries[-1], Mask(causal, window))


class _DeviceMasks(NamedTuple):
    """Masks of one pair of boundary tensors at one version."""

    keys: TensorWeakRef
    versions: tuple[int, int]
    masks: dict[Any, Mask]


_device_masks = WeakTensorKeyDictionary()  # by the queries' boundaries


def _mask_on_device(queries: Boundaries, keys: Boundaries, rules: Mask, is_traced: bool) -> Mask:
    """Return a mask with tables on the boundaries' device.

    Not cached in a CUDA graph, because a replay has to compute the tables from new boundaries.
    """
    q_values, k_values = queries.values, keys.values
    assert isinstance(q_values, Tensor) and isinstance(k_values, Tensor)
    no_cache = is_traced or q_values.is_inference() or k_values.is_inference()  # inference tensors have no version
    if no_cache or (q_values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _checked_mask(queries, keys, rules)
    versions = q_values._version, k_values._version
    entry = _device_masks.get(q_values)
    if entry is None or entry.keys() is not k_values or entry.versions != versions:
        entry = _device_masks[q_values] = _DeviceMasks(TensorWeakRef(k_values), versions, {})
    key = queries.num_tokens, keys.num_tokens, rules.bounds()
    if key not in entry.masks:
        with torch.inference_mode(False):
            entry.masks[key] = _checked_mask(queries, keys, rules)
    return entry.masks[key]


def _checked_mask(queries: Boundaries, keys: Boundaries, rules: Mask) -> Mask:
    """Make a mask. Numbers that are not valid fail an assertion on the device; indices stay in range whatever they are."""
    for name, values, num_tokens in (queries,) if keys is queries else (queries, keys):
        assert isinstance(values, Tensor)
        valid = (values[0] == 0) & (values[-1] == num_tokens) & (values.diff() >= 0).all()
        torch._assert_async(valid, f"{name}: boundaries must begin with 0, not decrease, and end with the number of tokens")
    assert isinstance(queries.values, Tensor) and isinstance(keys.values, Tensor)
    return _make_mask(queries.values, keys.values, queries.num_tokens, keys.num_tokens, rules)


def _make_mask(queries: Tensor, keys: Tensor, num_queries: int, num_keys: int, rules: Mask) -> Mask:
    if keys is queries:
        return rules.with_tables(tables_from_boundaries(queries, num_queries))
    left, right = rules.bounds()[:2]
    tables = joint_tables_from_boundaries(queries, keys, num_queries, num_keys, left, right)
    return rules.with_tables(tables, (num_queries, num_keys))
