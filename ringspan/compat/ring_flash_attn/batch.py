"""ring_flash_attn_…, zigzag_ring_flash_attn_… and stripe_flash_attn_… for batches of sequences of one length.

Each is one call of `ring_attention` with a layout: no tensor is copied or exchanged before it.
"""

from typing import Any

from torch import Tensor

from ringspan.compat.options import as_flash_result, pad_width, split_packed
from ringspan.compat.ring_flash_attn.call import document, reported_to_peers, ring_options, shared_seed, size_and_rank
from ringspan.kernels.mask import Mask
from ringspan.parallel.coordination.process_groups import GroupLike, as_process_group
from ringspan.parallel.layout import Layout
from ringspan.parallel.ring_attention import ring_attention

TEXT = """Compute attention of a sequence of which each rank has {shard}: ring-flash-attn's `{name}`.

    Args:
        {tensors}: This rank's shards, {shapes}; n is equal on all ranks.
        dropout_p: Probability of dropping an attention weight. The pattern is the same for any number of ranks.
        softmax_scale: Factor of the scores; None is D ** −0.5.
        causal: Let a query attend to no later key.
        window_size: (left, right) in positions of the whole sequence; −1 is no bound.
        alibi_slopes: None.
        deterministic: Make gradients equal bit for bit in every run.
        return_attn_probs: Return (out, lse, None).
        group: Process group of the ring; None is the default group.

    Returns:
        out (B, n, Hq, D), and with `return_attn_probs` lse (B, Hq, n) in fp32 and None.

    Raises:
        ValueError: An option is not supported, or the shards do not fit the layout.
    """


def run_batch(kind: str, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], group: GroupLike | None) -> Any:
    """Call `ring_attention` on shards of a layout."""
    ring = as_process_group(group)
    size, _ = size_and_rank(ring)
    with reported_to_peers(ring, q):
        known = ring_options(*options)
        for letter, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim != 4:
                shape = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
                raise ValueError(f"{letter}={shape}: it must be (B, n, heads, head dim)")
        if kind == "zigzag" and size > 1 and q.shape[1] % 2:
            raise ValueError(
                f"q has {q.shape[1]} tokens: a zigzag shard is two chunks of one length; pad to a multiple of {2 * size}"
            )
        layout = Layout(kind, q.shape[1] * size, size)
        width, (q, k, v) = v.shape[-1], pad_width(q, k, v, known)
        mask = Mask(known.pop("causal"), known.pop("window"))
    seed = shared_seed(known["dropout"], q.device, ring)
    return as_flash_result(ring_attention(q, k, v, mask, **known, seed=seed, layout=layout, group=ring), width)


def _make(prefix: str, kind: str, shard: str) -> tuple[Any, Any, Any]:
    """Return the three functions of a layout."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
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
        return run_batch(kind, q, k, v, options, group)

    def kvpacked_func(
        q: Tensor,
        kv: Tensor,
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
        k, v = split_packed("kv", kv, 2, 2)
        return run_batch(kind, q, k, v, options, group)

    def qkvpacked_func(
        qkv: Tensor,
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
        q, k, v = split_packed("qkv", qkv, 2, 3)
        return run_batch(kind, q, k, v, options, group)

    forms = [
        (func, "q, k, v", "q (B, n, Hq, D), k and v (B, n, Hkv, D)"),
        (kvpacked_func, "q, kv", "q (B, n, Hq, D), kv (B, n, 2, Hkv, D)"),
        (qkvpacked_func, "qkv", "(B, n, 3, H, D)"),
    ]
    made = []
    for function, tensors, shapes in forms:
        name = f"{prefix}_{function.__name__}"
        made.append(document(function, name, TEXT.format(name=name, shard=shard, tensors=tensors, shapes=shapes)))
    return made[0], made[1], made[2]


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _make(
    "ring_flash_attn", "contiguous", "a part without gaps"
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _make(
    "zigzag_ring_flash_attn", "zigzag", "chunks r and 2P−1−r of 2P"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _make(
    "stripe_flash_attn", "striped", "every P-th token"
)
