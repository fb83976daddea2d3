"""llama3_flash_attn_…: a packed sequence of which rank r has the r-th of P parts, with documents of any length.

ring-flash-attn passes only the boundaries of a rank's own documents to the function, and a slice of the keys. A ring needs
those of the whole sequence. `llama3_flash_attn_prepare_cu_seqlens` has them, and keeps them in the slice: its start is an int
that carries them. So they stay with the values that it returns, whatever is prepared in between.
"""

from bisect import bisect_left
from typing import Any

from torch import Tensor

from ringspan.compat.options import as_flash_result, pad_width, split_packed
from ringspan.compat.ring_flash_attn.call import document, reported_to_peers, ring_options, shared_seed, size_and_rank
from ringspan.compat.ring_flash_attn.exchange import host_boundaries
from ringspan.kernels.varlen import check_packed
from ringspan.parallel.coordination.process_groups import GroupLike, as_process_group
from ringspan.parallel.layout import Layout
from ringspan.parallel.ring_attention_varlen import ring_attention_varlen

PREPARE = "call llama3_flash_attn_prepare_cu_seqlens of ringspan.compat.ring_flash_attn and pass its local_k_slice"
TEXT = """Compute attention within packed documents, of which a rank has the r-th of P parts: ring-flash-attn's `{name}`.

    The first six arguments after the tensors are those that `llama3_flash_attn_prepare_cu_seqlens` returns, and
    `heads_k_stride`. The causal rule balances no work between ranks in this layout; zigzag_ring_flash_attn_varlen_… does.

    Args:
        {tensors}: This rank's shards, {shapes}.
        cu_seqlens_q: No effect: `local_k_slice` carries the boundaries of the whole sequence.
        cu_seqlens_k: No effect.
        max_seqlen_q: No effect.
        max_seqlen_k: No effect.
        heads_k_stride: No effect: keys and values are sent rank by rank, and are never all in one place.
        local_k_slice: The slice that `llama3_flash_attn_prepare_cu_seqlens` returned.
        dropout_p: Probability of dropping an attention weight.
        softmax_scale: Factor of the scores; None is D ** −0.5.
        causal: Let a query attend to no later key.
        window_size: (left, right) in positions of a document; −1 is no bound.
        alibi_slopes: None.
        deterministic: Make gradients equal bit for bit in every run.
        return_attn_probs: Return (out, lse, None).
        group: Process group of the ring; None is the default group.

    Returns:
        out (n, Hq, D), and with `return_attn_probs` lse (Hq, n) in fp32 and None.

    Raises:
        ValueError: `local_k_slice` was not prepared, or for another shard; or an option is not supported.
    """


class PreparedStart(int):
    """The start of a local_k_slice, which carries what was prepared."""

    boundaries: tuple[int, ...]  # of the whole packed sequence
    causal: bool
    rank: int
    world_size: int


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return the boundaries of a rank's queries, and of the keys that they need.

    Args:
        cu_seqlens: (documents + 1,) boundaries of the whole packed sequence. A tensor on a GPU is read, with a synchronisation.
        causal: As in the call that follows.
        rank: Rank in the ring.
        world_size: Number of ranks.

    Returns:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: the values that ring-flash-attn returns. The
        slice also carries `cu_seqlens`.

    Raises:
        ValueError: The number of tokens is not a multiple of `world_size`, or an argument is not valid.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens={cu_seqlens!r} must be an int32 tensor of shape (documents + 1,)")
    boundaries = host_boundaries(cu_seqlens)
    if len(boundaries) < 2 or boundaries[0] != 0 or list(boundaries) != sorted(boundaries):
        raise ValueError(f"cu_seqlens={boundaries}: boundaries must begin with 0, not decrease, and end with the last document")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}, world_size={world_size}: ranks are counted from 0 to world_size - 1")
    if boundaries[-1] % world_size:
        raise ValueError(
            f"cu_seqlens ends with {boundaries[-1]} tokens, no multiple of world_size={world_size}: pad the sequence with one "
            "more document"
        )
    local_length = boundaries[-1] // world_size
    begin, end = rank * local_length, (rank + 1) * local_length
    first, last = bisect_left(boundaries, begin), bisect_left(boundaries, end)
    first -= boundaries[first] != begin  # the document that the shard begins in
    touched = cu_seqlens[first : last + 1]
    cu_seqlens_q = (touched - begin).clamp(0, local_length)
    k_end = end if causal else boundaries[last]
    cu_seqlens_k = touched.clamp(max=k_end) - boundaries[first]
    start = PreparedStart(boundaries[first])
    start.boundaries, start.causal, start.rank, start.world_size = boundaries, bool(causal), rank, world_size
    longest_q, longest_k = (int(x.diff().max()) for x in (cu_seqlens_q, cu_seqlens_k))
    return cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, slice(start, k_end)


def run_llama3(q: Tensor, k: Tensor, v: Tensor, local_k_slice: Any, known: dict[str, Any], group: GroupLike | None) -> Any:
    """Call `ring_attention_varlen` with the boundaries that a slice carries; `known` are its options."""
    ring = as_process_group(group)
    size, rank = size_and_rank(ring)
    with reported_to_peers(ring, q):
        prepared = _prepared(local_k_slice, known["causal"], size, rank)
        check_packed(q=q, k=k, v=v)
        layout = Layout("contiguous", prepared.boundaries[-1], size)
        if len(q) != layout.local_length:
            raise ValueError(
                f"q has {len(q)} tokens, local_k_slice is of shards of {layout.local_length}: in every step, {PREPARE}"
            )
        width, (q, k, v) = v.shape[-1], pad_width(q, k, v, known)
    seed = shared_seed(known["dropout"], q.device, ring)
    result: Any = ring_attention_varlen(q, k, v, list(prepared.boundaries), **known, seed=seed, layout=layout, group=ring)
    return as_flash_result(result, width)


def _prepared(local_k_slice: Any, causal: bool, size: int, rank: int) -> PreparedStart:
    start = getattr(local_k_slice, "start", None)
    if not isinstance(start, PreparedStart):
        raise ValueError(f"local_k_slice={local_k_slice!r} does not carry the boundaries of the whole sequence: {PREPARE}")
    for name, prepared, here in (
        ("causal", start.causal, causal),
        ("world_size", start.world_size, size),
        ("rank", start.rank, rank),
    ):
        if prepared != here:
            raise ValueError(
                f"local_k_slice was prepared with {name}={prepared}, and this call has {name}={here}: use one value"
            )
    return start


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike | None = None,
) -> Any:
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
    with reported_to_peers(as_process_group(group), q):
        known = ring_options(*options)
    return run_llama3(q, k, v, local_k_slice, known, group)


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike | None = None,
) -> Any:
    prepared: Any = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice
    options: Any = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return llama3_flash_attn_varlen_func(q, *split_packed("kv", kv, 1, 2), *prepared, *options)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike | None = None,
) -> Any:
    prepared: Any = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice
    options: Any = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return llama3_flash_attn_varlen_func(*split_packed("qkv", qkv, 1, 3), *prepared, *options)


for _function, _tensors, _shapes in (
    (llama3_flash_attn_varlen_func, "q, k, v", "q (n, Hq, D), k and v (n, Hkv, D)"),
    (llama3_flash_attn_varlen_kvpacked_func, "q, kv", "q (n, Hq, D), kv (n, 2, Hkv, D)"),
    (llama3_flash_attn_varlen_qkvpacked_func, "qkv", "(n, 3, H, D)"),
):
    _name = _function.__name__
    document(_function, _name, TEXT.format(name=_name, tensors=_tensors, shapes=_shapes))
