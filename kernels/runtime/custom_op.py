"""Operators: our work as torch's dispatcher, compiler, checkpointing and autograd see it, one call each way.

    @operator("attention_forward", fake=shapes, save=save, differentiate=backward)
    def attention_forward(q: Tensor, …) -> tuple[Tensor, Tensor]: …       now it is torch.ops.ringspan.attention_forward

`torch.library.custom_op` would do, but with gradients a call through it takes twice as long: it lists the schema's arguments
again for each argument, to fill in defaults that ours do not have. A kernel of 300 µs cannot hide that. What it does beside,
ours do without: arguments with defaults, lists of tensors, a check that no output is an input, and reloading the module.

What the dispatcher does for a call takes longer than any of our checks. Where nobody listens (no compiler or tracer, no mode
such as checkpointing's, no torch.func, no profiler of this thread) and tensors are ordinary, the function is called directly.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import has_torch_function


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
        parameters = list(inspect.signature(run).parameters.values())
        assert parameters[0].annotation in (torch.Tensor, "Tensor"), name
        assert all(p.default is p.empty and "Tensor]" not in str(p.annotation) for p in parameters), name
        full = f"ringspan::{name}"
        schema = torch.library.infer_schema(run, mutates_args=())
        torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(full, "default", torch._disable_dynamo(run))
        torch.library.register_fake(full, fake)
        dispatched = getattr(torch.ops.ringspan, name).default

        def below(*given: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return dispatched(*given)

        torch.library.impl(full, "Autograd", _with_gradients(name, below, save, differentiate))
        straight = _with_gradients(name, run, save, differentiate)

        def call(*given: Any) -> Any:
            return straight(*given) if _nobody_listens(given) else dispatched(*given)

        return call

    return made


def _nobody_listens(given: tuple[Any, ...]) -> bool:
    """Whether nothing around a call, and none of its tensors, has work of its own to do in the dispatcher."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch.autograd._profiler_enabled():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if has_torch_function(given) or given[0].is_meta:
        return False
    kind = torch._C._dispatch_keys(given[0])
    if kind.has(torch._C.DispatchKey.Python) or kind != _keys_of_a_new_tensor(given[0].device.type):
        return False
    return all(torch._C._dispatch_keys(x) == kind for x in given if isinstance(x, torch.Tensor))


@functools.cache
def _keys_of_a_new_tensor(device: str) -> Any:
    with torch.inference_mode(False):
        return torch._C._dispatch_keys(torch.empty(0, device=device))


def _with_gradients(
    name: str, below: Callable[..., Any], save: Callable[..., None] | None, differentiate: Callable[..., Any] | None
) -> Callable[..., Any]:
    """A call of what is below, recorded for autograd if an argument needs a gradient."""

    def forward(ctx: Any, *given: Any) -> Any:
        output = below(*given)
        if save is not None:
            save(ctx, given, output)
        return output

    def backward(ctx: Any, *gradients: Any) -> Any:
        if differentiate is None:
            raise RuntimeError(f"{name} has no derivative of its own: leave out create_graph=True")
        return differentiate(ctx, *gradients)

    recorded = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply

    def choose(*given: Any) -> Any:
        differentiable = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        return recorded(*given) if differentiable else below(*given)

    return choose
