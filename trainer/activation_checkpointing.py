"""What a layer keeps for the backward, between nothing and everything.

    none        everything that autograd wants
    full        the layer's input; all of it runs again in the backward, the ring's whole journey too
    attention   the input, and attention's (out, lse): the ring, which is the dear part of a long sequence, never runs twice
                (with parallel.ulysses above 1, the exchange of heads around it does)

`attention` keeps one more tensor of the input's size per layer than `full`. With `offload`, inputs wait in pinned CPU memory:
each is copied out while its layer runs, and fetched while the layer after it goes backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = ("ringspan::attention_forward", "ringspan::ring_forward")


def install(model: Any, activations: str, offload: bool, compiled: bool) -> None:
    """Sets how the model runs its layers."""
    if compiled and activations == "none":
        model.compile_layers()
        return
    run: Callable[..., Tensor] = {"none": plain, "full": _full, "attention": _but_attention}[activations]
    if compiled:
        # One graph serves all layers: their weights are its inputs. The checkpointing is inside, where the compiler can
        # follow it; around a compiled layer nobody would see the ops that are to be kept.
        run = torch.compile(run)
    model.run_layer = partial(_offloaded, Offload(), run) if offload else run


def plain(layer: nn.Module, *inputs: Any) -> Tensor:
    return layer(*inputs)


def _full(layer: nn.Module, *inputs: Any) -> Tensor:
    # No state of a random generator: dropout is a function of coordinates, so it repeats by itself.
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _but_attention(layer: nn.Module, *inputs: Any) -> Tensor:
    options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    return checkpoint(layer, *inputs, context_fn=_contexts, **options)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op.name().partition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _offloaded(offload: "Offload", run: Callable[..., Tensor], layer: nn.Module, hidden: Tensor, *rest: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return run(layer, hidden, *rest)
    with torch.autograd.graph.saved_tensors_hooks(partial(offload.pack, hidden), offload.unpack):
        return run(layer, hidden, *rest)


class Offload:
    """Moves layers' inputs to the CPU and back, on a stream of its own."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.waiting: list[Parcel] = []  # in the order of the forward: the backward wants the last first

    def pack(self, wanted: Tensor, saved: Tensor) -> Any:
        """Of what a layer's checkpoint saves, only the hidden states: rotations and documents are shared by all layers."""
        if saved.data_ptr() != wanted.data_ptr() or saved.shape != wanted.shape:
            return saved
        if saved.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream()
        parcel = Parcel(saved.detach(), self.stream)
        self.waiting.append(parcel)
        return parcel

    def unpack(self, parcel: Any) -> Tensor:
        if not isinstance(parcel, Parcel):
            return parcel
        value = parcel.take()
        if parcel in self.waiting:
            del self.waiting[self.waiting.index(parcel) :]
        if self.waiting:
            self.waiting[-1].fetch()  # the next that will be asked for, while this one's layer computes
        return value


class Parcel:
    """A tensor whose home is the CPU until it is taken."""

    def __init__(self, value: Tensor, stream: Any) -> None:
        self.stream, self.device = stream, value.device
        self.here: Tensor | None = None
        self.away = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        if stream is None:
            self.away.copy_(value)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.away.copy_(value, non_blocking=True)
        value.record_stream(stream)  # its memory may be used again only after the copy

    def fetch(self) -> None:
        if self.here is not None:
            return
        if self.stream is None:
            self.here = self.away
            return
        with torch.cuda.stream(self.stream):
            self.here = self.away.to(self.device, non_blocking=True)

    def take(self) -> Tensor:
        self.fetch()
        assert self.here is not None
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.here.record_stream(torch.cuda.current_stream())
        value, self.here = self.here, None
        return value
