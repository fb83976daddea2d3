"""`save_attention`: activation checkpointing that recomputes a layer without its attention, so that the ring runs once."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SAVED_OPERATORS = ("ringspan::attention_forward", "ringspan::ring_forward")


def save_attention() -> Any:
    """Return the contexts of a selective activation checkpoint that keeps attention's (out, lse).

    Pass the function itself, not its result. It needs use_reentrant=False.

    Returns:
        The pair of context managers that torch.utils.checkpoint expects from `context_fn`.

    Example:
        >>> model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=ringspan.hf.save_attention))
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op.name().partition(".")[0] in SAVED_OPERATORS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
