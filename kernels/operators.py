"""Operators: our work as torch's dispatcher, compiler, checkpointing and autograd see it, one call each way.

    @operator("attention_forward", fake=shapes, save=save, differentiate=backward)
    def attention_forward(q: Tensor, …) -> tuple[Tensor, Tensor]: …       now it is torch.ops.ringspan.attention_forward

`torch.library.custom_op` would do, but with gradients a call through it takes twice as long: it lists the schema's arguments
again for each argument, to fill in defaults that ours do not have. A kernel of 300 µs cannot hide that. What it does beside,
ours do without: arguments with defaults, lists of tensors, a check that no output is an input, and reloading the module.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function


def operator(
    name: str,
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function with annotated arguments that changes none of them becomes the operator ringspan::NAME.

    fake(*given) returns empty outputs of the right shapes, save(ctx, given, output) keeps what differentiate(ctx, *gradients)
    needs, as in torch.autograd.Function. Without these two it has no derivative.
    """

    def made(run: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(run).parameters.values()
        assert all(p.default is p.empty and "Tensor]" not in str(p.annotation) for p in parameters), name
        full = f"ringspan::{name}"
        schema = torch.library.infer_schema(run, mutates_args=())
        torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(full, "default", torch._disable_dynamo(run))
        torch.library.register_fake(full, fake)
        call = getattr(torch.ops.ringspan, name).default
        torch.library.impl(full, "Autograd", _autograd(call, save, differentiate))
        return call

    return made


def _autograd(call: Callable[..., Any], save: Callable[..., None] | None, differentiate: Callable[..., Any] | None) -> Any:
    """What the dispatcher does first, with gradients or without."""

    def below(*given: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return call(*given)

    def forward(ctx: Any, *given: Any) -> Any:
        output = below(*given)
        if save is not None:
            save(ctx, given, output)
        return output

    def backward(ctx: Any, *gradients: Any) -> Any:
        if differentiate is None:
            raise RuntimeError(f"{call} has no derivative of its own: leave out create_graph=True")
        return differentiate(ctx, *gradients)

    recorded = type(f"{call}", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply

    def choose(*given: Any) -> Any:
        differentiable = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        return recorded(*given) if differentiable else below(*given)

    return choose
