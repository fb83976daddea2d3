"""Ulysses: an all-to-all that trades positions for heads, attention over whole sequences of some heads, and one back.

    (B, n, H, D) of this rank's tokens   ⇄   (B, U · n, H / U, D) of all tokens of the group, for this rank's heads

A layout made for it puts the group's shards one after another, so what is gathered is in order: the ring's own shard. Key
heads that do not divide by U are repeated, but only until they do, so that each rank gets those its query heads use. The
exchange is one operator, whose backward is the exchange the other way.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.kernels.runtime.custom_op import operator
from ringspan.parallel.coordination import arrivals, progress
from ringspan.parallel.coordination.argument_check import FIRST, check_same_on_all_ranks
from ringspan.parallel.coordination.process_groups import by_name, timeout_of

EXCHANGES = 4 * FIRST  # of q, k, v and out: the first calls are compared here too, before anything is sent


def to_heads(x: Tensor, size: int, group: str, among: str) -> Tensor:
    """This rank's tokens with all heads → all of the group's tokens with this rank's heads. `among`: who compares shapes.

    Too few heads are repeated. How many there were is compared too: once repeated, different ones may look the same.
    """
    return exchange_op(repeat_heads(x, size), size, group, among, True, x.shape[2])


def to_tokens(x: Tensor, size: int, group: str, among: str) -> Tensor:
    """The way back."""
    return exchange_op(x, size, group, among, False, x.shape[2])


def repeat_heads(x: Tensor, size: int) -> Tensor:
    times = next(n for n in range(1, size + 1) if x.shape[2] * n % size == 0)
    return x if times == 1 else x.repeat_interleave(times, 2)


def check_heads(heads: int, size: int, ranks: int) -> None:
    if heads % size:
        fits = [n for n in range(1, heads + 1) if heads % n == ranks % n == 0]
        raise ValueError(
            f"ulysses={size} does not divide q's {heads} heads: on {ranks} ranks take one of {fits}, the ring takes the rest"
        )


def _exchanged(x: Tensor, size: int, group: str, among: str, gather: bool, given: int) -> Tensor:
    batch, rows, heads, width = x.shape
    if gather:
        return x.new_empty((batch, rows * size, heads // size, width))
    return x.new_empty((batch, rows // size, heads * size, width))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.rest, ctx.gather, ctx.given = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_op(grad, *ctx.rest, not ctx.gather, ctx.given), None, None, None, None, None


@operator("exchange_heads", fake=_exchanged, save=_save, differentiate=_differentiate)
def exchange_op(x: Tensor, size: int, group: str, among: str, gather: bool, given: int) -> Tensor:
    progress.enter("ulysses exchange")
    _, rows, heads, _ = x.shape
    if gather:  # the rank to send to comes first
        sent = x.unflatten(2, (size, heads // size)).permute(2, 0, 1, 3, 4).contiguous()
    else:
        sent = x.unflatten(1, (size, rows // size)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    check_same_on_all_ranks(
        among, x.device, lambda: {"what is exchanged": (tuple(x.shape), str(x.dtype), gather), "heads": given}, EXCHANGES
    )
    everyone = by_name(group)
    seconds = timeout_of(everyone, x.device).total_seconds()
    # On a GPU the host does not wait, so it would be here long before the device is.
    missing = "all ranks of its group" if x.is_cuda else arrivals.announce_arrival(everyone)
    progress.wait(lambda: dist.all_to_all_single(received, sent, group=everyone), missing, seconds)
    if x.is_cuda:
        progress.expect("all ranks of its group", seconds)
    if gather:  # (U, B, n, h, D) → (B, U · n, h, D)
        return received.transpose(0, 1).flatten(1, 2).contiguous()
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()  # (U, B, n, h, D) → (B, n, U · h, D)
