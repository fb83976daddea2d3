"""Operators that torch's dispatcher, compiler, checkpointing and autograd see as one call per direction.

    @operator("attention_forward", fake=shapes, save=save, differentiate=backward)
    def attention_forward(q: Tensor, …) -> tuple[Tensor, Tensor]: …       registers torch.ops.ringspan.attention_forward

`torch.library.custom_op` does the same, but with gradients a call through it takes twice as long: it iterates over the schema
once per argument to fill in defaults, which our operators do not have. A kernel of 300 µs does not hide that time. Not
supported: arguments with defaults, lists of tensors, the check that no output aliases an input, and reloading the module.

The dispatcher takes more time per call than our validation. A call bypasses it if no compiler, tracer, dispatch mode (such as
checkpointing's), torch.func transform or profiler of this thread is active and all tensors are plain.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import has_torch_function

from ringspan.kernels.runtime.work_counters import current_call

# by operator: f(*args, run=g), for a caller that asked may_bypass_dispatcher(args) and has a faster g for these arguments
without_dispatcher: dict[str, Callable[..., Any]] = {}

_DTENSOR = (
    "{0} is a DTensor, which this operator does not take: pass {0}.full_tensor(), or {0}.to_local() if it is replicated or "
    "sharded by batch or heads; ring_attention takes DTensors that are sharded on the sequence"
)
_TORCH_FUNC = "{0} has no derivative in torch.func (grad, vjp, jacrev): differentiate with backward() or torch.autograd.grad"


def operator(
    name: str,
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the operator ringspan::NAME.

    The function has annotated arguments without defaults, the first a tensor, and modifies none of them.

    Args:
        name: Name of the operator.
        fake: fake(*args) returns empty outputs of the right shapes.
        save: save(ctx, args, output) stores what `differentiate` needs, as in torch.autograd.Function.
        differentiate: differentiate(ctx, *gradients) returns the inputs' gradients. Without it the operator has no derivative.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(run).parameters.values())
        assert parameters[0].annotation in (torch.Tensor, "Tensor"), name
        assert all(p.default is p.empty and "Tensor]" not in str(p.annotation) for p in parameters), name
        full = f"ringspan::{name}"
        schema = torch.library.infer_schema(run, mutates_args=())
        torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(full, "default", torch._disable_dynamo(run))
        torch.library.register_fake(full, fake)
        dispatched = getattr(torch.ops.ringspan, name).default

        def below_autograd(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return dispatched(*args)

        torch.library.impl(full, "Autograd", _with_gradients(name, below_autograd, save, differentiate))
        direct = without_dispatcher[name] = _called_eagerly(_with_gradients(name, run, save, differentiate))

        def call(*args: Any) -> Any:
            if may_bypass_dispatcher(args):
                return direct(*args)
            try:
                return dispatched(*args)
            except RuntimeError as error:  # asked afterwards, because DTensors work if the caller registers a strategy
                for parameter, x in zip(parameters, args, strict=True):
                    if hasattr(x, "full_tensor"):
                        raise ValueError(_DTENSOR.format(parameter.name)) from error
                raise

        return call

    return decorate


def _called_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its calls marked as those of eager code (see work_counters.py)."""

    def call(*args: Any, **options: Any) -> Any:
        current_call.is_eager = True
        try:
            return function(*args, **options)
        finally:
            current_call.is_eager = False

    return call


def may_bypass_dispatcher(args: tuple[Any, ...]) -> bool:
    """Return whether no mode, transform, tracer, profiler or tensor type needs to intercept this call."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch.autograd._profiler_enabled():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if has_torch_function(args) or args[0].is_meta:
        return False
    keys = torch._C._dispatch_keys(args[0])
    if keys.has(torch._C.DispatchKey.Python) or keys != _plain_tensor_keys(args[0].device.type):
        return False
    for x in args:  # noqa: SIM110 (all() takes longer)
        if isinstance(x, torch.Tensor) and torch._C._dispatch_keys(x) != keys:
            return False
    return True


@functools.cache
def _plain_tensor_keys(device: str) -> Any:
    with torch.inference_mode(False):
        return torch._C._dispatch_keys(torch.empty(0, device=device))


def _with_gradients(
    name: str, run: Callable[..., Any], save: Callable[..., None] | None, differentiate: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return a function that calls `run`, recorded for autograd if an argument requires a gradient."""
    short_name = name.removesuffix("_forward").removesuffix("_backward")

    def forward(ctx: Any, *args_and_run: Any) -> Any:
        args, run = args_and_run[:-1], args_and_run[-1]  # at the end, so that ctx.needs_input_grad begins with the arguments
        output = run(*args)
        if save is not None:
            save(ctx, args, output)
        return output

    def backward(ctx: Any, *gradients: Any) -> Any:
        if differentiate is None:
            raise ValueError(f"{short_name} has no second derivative: leave out create_graph=True")
        return *differentiate(ctx, *gradients), None

    function: Any = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    recorded = function.apply

    def choose(*args: Any, run: Callable[..., Any] = run) -> Any:
        if torch.is_grad_enabled():
            for x in args:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    try:
                        return recorded(*args, run)
                    except RuntimeError as error:
                        if torch._C._are_functorch_transforms_active():
                            raise ValueError(_TORCH_FUNC.format(short_name)) from error
                        raise
        return run(*args)

    return choose
