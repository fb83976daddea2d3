"""Ulysses: an all-to-all that exchanges positions for heads, before and after attention.

    (B, n, H, D) of this rank's tokens   ⇄   (B, U · n, H / U, D) of the group's tokens, for this rank's heads

Each rank then computes attention over all tokens of its Ulysses group for some heads. A layout with `ulysses` = U makes the
gathered rows the ring rank's shard, in order. KV heads that U does not divide are repeated as often as needed, so that each
rank gets the KV heads of its query heads. The exchange is one operator; its backward is the exchange in the other direction.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.kernels.runtime.custom_op import operator
from ringspan.parallel.coordination import arrivals, progress
from ringspan.parallel.coordination.argument_check import COMPARED_CALLS, check_same_on_all_ranks
from ringspan.parallel.coordination.process_groups import group_by_name, timeout_of

COMPARED_EXCHANGES = 4 * COMPARED_CALLS  # q, k, v and out: a call has four exchanges


def to_heads(x: Tensor, size: int, group: str, sequence_group: str, return_lse: bool = False) -> Tensor:
    """Gather the tokens of a Ulysses group for this rank's heads.

    Args:
        x: (B, n, H, D), this rank's tokens with all heads. Heads are repeated until `size` divides their number.
        size: Number of ranks in the Ulysses group.
        group: Name of the Ulysses group.
        sequence_group: Name of the group of all ranks of the sequence, which compare their arguments.
        return_lse: Whether the call also exchanges lse. Ranks compare it, because one that does not would not take part.

    Returns:
        (B, size · n, H' / size, D), where H' is the number of heads after repetition.
    """
    return exchange_op(repeat_heads(x, size), size, group, sequence_group, True, x.shape[2], return_lse)


def to_tokens(x: Tensor, size: int, group: str, sequence_group: str, return_lse: bool = False) -> Tensor:
    """Undo `to_heads`: (B, size · n, h, D) of this rank's heads to (B, n, size · h, D) of this rank's tokens."""
    return exchange_op(x, size, group, sequence_group, False, x.shape[2], return_lse)


def repeats_of_heads(heads: int, size: int) -> int:
    """Return how often each of `heads` heads is repeated so that `size` divides them."""
    return next(n for n in range(1, size + 1) if heads * n % size == 0)


def repeat_heads(x: Tensor, size: int) -> Tensor:
    """Repeat each head of (B, n, H, D) as few times as make `size` divide their number."""
    repeats = repeats_of_heads(x.shape[2], size)
    return x if repeats == 1 else x.repeat_interleave(repeats, 2)


def check_heads(heads: int, size: int, ranks: int) -> None:
    """Raise a ValueError if `size` does not divide the number of query heads."""
    if heads % size:
        possible = [n for n in range(1, heads + 1) if heads % n == ranks % n == 0]
        raise ValueError(
            f"ulysses={size} does not divide q's {heads} heads: "
            f"on {ranks} ranks take one of {possible}, the ring takes the rest"
        )


def _empty_output(x: Tensor, size: int, group: str, sequence_group: str, gather: bool, *compared: Any) -> Tensor:
    batch, rows, heads, width = x.shape
    if gather:
        return x.new_empty((batch, rows * size, heads // size, width))
    return x.new_empty((batch, rows // size, heads * size, width))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.options, ctx.gather, ctx.num_heads, ctx.return_lse = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_op(grad, *ctx.options, not ctx.gather, ctx.num_heads, ctx.return_lse), *[None] * 6


@operator("exchange_heads", fake=_empty_output, save=_save, differentiate=_differentiate)
def exchange_op(
    x: Tensor, size: int, group: str, sequence_group: str, gather: bool, num_heads: int, return_lse: bool
) -> Tensor:
    """All-to-all of tokens and heads. Ranks compare `num_heads`, the heads before repetition, which can hide a difference."""
    progress.enter("ulysses exchange")
    _, rows, heads, _ = x.shape
    if gather:  # the destination rank becomes the first dimension
        send_buffer = x.unflatten(2, (size, heads // size)).permute(2, 0, 1, 3, 4).contiguous()
    else:
        send_buffer = x.unflatten(1, (size, rows // size)).transpose(0, 1).contiguous()
    recv_buffer = torch.empty_like(send_buffer)
    check_same_on_all_ranks(
        sequence_group,
        x.device,
        lambda: {"Ulysses input": (tuple(x.shape), str(x.dtype), gather), "heads": num_heads, "return_lse": return_lse},
        COMPARED_EXCHANGES,
    )
    process_group = group_by_name(group)
    timeout_s = timeout_of(process_group, x.device).total_seconds()
    # On a GPU the host does not wait, so arrival of the host would say nothing about the device.
    missing = "all ranks of its group" if x.is_cuda else arrivals.announce_arrival(process_group)
    progress.wait(lambda: dist.all_to_all_single(recv_buffer, send_buffer, group=process_group), missing, timeout_s)
    if x.is_cuda:
        progress.expect("all ranks of its group", timeout_s)
    if gather:  # (U, B, n, h, D) → (B, U · n, h, D)
        return recv_buffer.transpose(0, 1).flatten(1, 2).contiguous()
    return recv_buffer.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()  # (U, B, n, h, D) → (B, n, U · h, D)
