"""Activation checkpointing: which tensors a layer keeps for its backward.

    none        every tensor that autograd saves
    full        the layer's input; the backward recomputes the whole layer, including the ring's communication
    attention   the input and attention's (out, lse). The ring is the most expensive part of a long sequence; it is not
                recomputed. With parallel.ulysses above 1 its exchange of heads is.

`attention` keeps one more tensor of the input's size per layer than `full`. With `offload`, inputs are kept in pinned host
memory: each is copied out while its layer runs, and prefetched while the following layer runs its backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SAVED_OPERATORS = ("ringspan::attention_forward", "ringspan::ring_forward")


def install(model: Any, activations: str, offload: bool, compiled: bool) -> None:
    """Set how the model runs its layers.

    Args:
        model: a GPT; its `run_layer` is replaced, or its layers are compiled.
        activations: "none", "full" or "attention".
        offload: keep the layers' inputs in host memory.
        compiled: compile the layers with torch.compile.
    """
    if compiled and activations == "none":
        model.compile_layers()
        return
    run: Callable[..., Tensor] = {"none": run_layer, "full": _recompute_all, "attention": _recompute_all_but_attention}[
        activations
    ]
    if compiled:
        # One graph serves all layers: their weights are its inputs. The checkpointing is part of the compiled function;
        # around a compiled layer it could not see the operators whose results it saves.
        run = torch.compile(run)
    model.run_layer = partial(_run_offloaded, Offload(), run) if offload else run


def run_layer(layer: nn.Module, *inputs: Any) -> Tensor:
    """Run a layer without checkpointing."""
    return layer(*inputs)


def _recompute_all(layer: nn.Module, *inputs: Any) -> Tensor:
    # No state of a random generator: dropout is a function of coordinates, so a recomputation repeats it.
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _recompute_all_but_attention(layer: nn.Module, *inputs: Any) -> Tensor:
    options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    return checkpoint(layer, *inputs, context_fn=_contexts, **options)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op.name().partition(".")[0] in SAVED_OPERATORS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _run_offloaded(offload: "Offload", run: Callable[..., Tensor], layer: nn.Module, hidden: Tensor, *inputs: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return run(layer, hidden, *inputs)
    with torch.autograd.graph.saved_tensors_hooks(partial(offload.pack, hidden), offload.unpack):
        return run(layer, hidden, *inputs)


class Offload:
    """Copies the layers' inputs to host memory and back, on its own stream."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.offloaded: list[OffloadedTensor] = []  # in the forward's order; the backward needs the last one first

    def pack(self, hidden: Tensor, saved: Tensor) -> Any:
        """Offload `saved` if it is the hidden state; all layers share rotations and documents, which stay on the GPU."""
        if saved.data_ptr() != hidden.data_ptr() or saved.shape != hidden.shape:
            return saved
        if saved.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream()
        tensor = OffloadedTensor(saved.detach(), self.stream)
        self.offloaded.append(tensor)
        return tensor

    def unpack(self, tensor: Any) -> Tensor:
        if not isinstance(tensor, OffloadedTensor):
            return tensor
        value = tensor.take()
        if tensor in self.offloaded:
            del self.offloaded[self.offloaded.index(tensor) :]
        if self.offloaded:
            self.offloaded[-1].prefetch()  # the input that the backward needs next
        return value


class OffloadedTensor:
    """A tensor in host memory, with a prefetch to its device."""

    def __init__(self, value: Tensor, stream: Any) -> None:
        self.stream, self.device = stream, value.device
        self.on_device: Tensor | None = None
        self.on_host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        if stream is None:
            self.on_host.copy_(value)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.on_host.copy_(value, non_blocking=True)
        value.record_stream(stream)  # the allocator may reuse its memory only after the copy

    def prefetch(self) -> None:
        if self.on_device is not None:
            return
        if self.stream is None:
            self.on_device = self.on_host
            return
        with torch.cuda.stream(self.stream):
            self.on_device = self.on_host.to(self.device, non_blocking=True)

    def take(self) -> Tensor:
        """Return the tensor on its device and drop the device copy."""
        self.prefetch()
        assert self.on_device is not None
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.on_device.record_stream(torch.cuda.current_stream())
        value, self.on_device = self.on_device, None
        return value
