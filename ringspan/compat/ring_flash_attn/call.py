"""Common part of the functions of ring-flash-attn: options, errors that reach all ranks, stacked tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.compat.options import as_window, score_options
from ringspan.parallel.coordination.argument_check import COMPARED_CALLS, report_rejection

Ring = dist.ProcessGroup | None


def size_and_rank(ring: Ring) -> tuple[int, int]:
    return (1, 0) if ring is None else (ring.size(), ring.rank())


def ring_options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """Return the options of `ring_attention_varlen`, from those of ring-flash-attn in the order of its signatures."""
    options = score_options(dropout_p, softmax_scale, 0.0, alibi_slopes, deterministic, return_attn_probs)
    return options | dict(causal=bool(causal), window=as_window(window_size))


@contextmanager
def reported_to_peers(ring: Ring, q: Any, compared_calls: int = COMPARED_CALLS) -> Iterator[None]:
    """Report a ValueError to the peer ranks, which would wait for this one."""
    try:
        yield
    except ValueError as error:
        if ring is not None and ring.size() > 1 and isinstance(q, Tensor):
            report_rejection(ring.group_name, q.device, error, compared_calls)
        raise


def shared_seed(dropout: float, device: torch.device, ring: Ring) -> Tensor | None:
    """Return a seed of dropout that is equal on all ranks, drawn from torch's generator of the first; None without dropout."""
    if not dropout:
        return None
    seed = torch.randint(2**62, (), device=device)
    if ring is not None and ring.size() > 1:
        dist.broadcast(seed, group=ring, group_src=0)
    return seed


def document(function: Any, name: str, text: str) -> Any:
    """Give a function made by a factory its public name and docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function
