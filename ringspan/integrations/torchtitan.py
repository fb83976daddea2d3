"""Attention of torchtitan 0.3 on a ring: an inner attention, and wrappers where torchtitan refuses foreign classes.

    ringspan.integrations.torchtitan.use_ringspan(model_spec.model)      in a function of your config registry
    --parallelism.context_parallel_degree=8 --parallelism.spmd_backend=partial_dtensor

`apply_cp_to_forward` then gives each layer its ring, and `prepare_context_parallel_input` passes the documents, which begin
where positions are 0, to the layers in place of a mask.
"""

import inspect
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import context_parallel
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenMetadata

from ringspan.hf.documents import documents_from_positions
from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.kernels.varlen import attention_varlen
from ringspan.parallel.layout import Layout
from ringspan.parallel.ring_attention import ring_attention

TESTED = "0.3.0"
KNOWN = {  # parameters of the functions that are replaced
    "apply_cp_to_forward": "attention_modules cp_mesh",
    "prepare_context_parallel_input": "inputs labels extra_kwargs cp_mesh device load_balancer_type ptrr_mask_key",
}
_originals: dict[str, Any] = {}


class SequenceDocuments:
    """Layout and documents of the whole sequences of a batch: the `attention_masks` of layers on a ring."""

    def __init__(self, layout: Layout, documents: Tensor | None) -> None:
        self.layout, self.documents = layout, None if documents is None else documents.cpu()
        self._masks: dict[Any, Mask] = {}

    def mask(self, causal: bool, window: int | None) -> Mask:
        """Return the mask of the whole sequences. Layers with equal rules share one."""
        if (causal, window) not in self._masks:
            self._masks[causal, window] = Mask(causal, window, self.documents)
        return self._masks[causal, window]


class RingspanAttention(ScaledDotProductAttention):
    """Inner attention on one GPU, or on a ring once `apply_ring` has set its group. q (B, L, N, H) to (B, L, N, H)."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        window: int | None = None  # tokens that a query attends to, itself included

    def __init__(self, config: "RingspanAttention.Config") -> None:
        super().__init__(config)
        self.window = config.window
        self.cp_mesh: DeviceMesh | None = None

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **options: Any,
    ) -> Tensor:
        """Compute attention. Without masks, on one rank, a row is one document."""
        unknown = [name for name, value in options.items() if value is not None]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not supported by RingspanAttention; FlexAttention has it")
        q, k, v = q_BLNH, k_BLNH, v_BLNH
        if self.cp_mesh is not None:
            if not isinstance(attention_masks, SequenceDocuments):
                raise ValueError(f"attention_masks={type(attention_masks).__name__} on a ring: {_LEGACY}")
            mask = attention_masks.mask(is_causal, self.window)
            return ring_attention(q, k, v, mask, scale=scale, layout=attention_masks.layout, group=self.cp_mesh)
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"q has {q.shape[1]} tokens, k has {k.shape[1]}: {_LEGACY}")
        if attention_masks is None:
            return attention(q, k, v, Mask(is_causal, self.window), scale=scale)
        if not isinstance(attention_masks, VarlenMetadata):
            raise ValueError(f"attention_masks={type(attention_masks).__name__}: VarlenMetadata or None work")
        q, k, v, shape = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape[:2]
        cu_seqlens = attention_masks.cu_seq_q.to(torch.int32)
        return attention_varlen(q, k, v, cu_seqlens, causal=is_causal, window=self.window, scale=scale).unflatten(0, shape)


_LEGACY = "context parallelism of RingspanAttention needs use_ringspan and parallelism.spmd_backend='partial_dtensor'"


def apply_ring(attention_modules: Any, cp_mesh: DeviceMesh) -> None:
    """Give each RingspanAttention its ring; other modules go to torchtitan's function."""
    if not isinstance(attention_modules[0], RingspanAttention):
        return _originals["apply_cp_to_forward"](attention_modules, cp_mesh)
    for module in attention_modules:
        module.cp_mesh = cp_mesh
    prepare_ring_input.is_used = True  # type: ignore[attr-defined]


def prepare_ring_input(
    inputs: Tensor, labels: Tensor, extra_kwargs: dict[str, Any], cp_mesh: DeviceMesh, device: torch.device,
    load_balancer_type: str | None = "headtail", ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Cut inputs, labels and positions (B, L), of any length, and find the documents."""
    if not getattr(prepare_ring_input, "is_used", False):
        theirs = _originals["prepare_context_parallel_input"]
        return theirs(inputs, labels, extra_kwargs, cp_mesh, device, load_balancer_type, ptrr_mask_key)
    kinds = {"headtail": "zigzag", None: "contiguous"}
    if load_balancer_type not in kinds:
        raise ValueError(f"context_parallel_load_balancer={load_balancer_type!r} on a ring: 'headtail' and None work")
    layout = Layout(kinds[load_balancer_type], inputs.shape[1], cp_mesh.size())
    rank, positions = cp_mesh.get_local_rank(), extra_kwargs["positions"]
    extra_kwargs["attention_masks"] = SequenceDocuments(layout, documents_from_positions(positions))
    extra_kwargs["positions"] = layout.shard(positions, 1, rank).contiguous()
    return layout.shard(inputs, 1, rank).contiguous(), layout.shard(labels, 1, rank, IGNORE_INDEX).contiguous(), extra_kwargs


def use_ringspan(model_config: Any, window: int | None = None) -> None:
    """Set RingspanAttention in all layers of a config, and torchtitan's functions of context parallelism to those above.

    Args:
        model_config: Config of a decoder of torchtitan, before it is built.
        window: Tokens that a query attends to, itself included; None is no window.

    Raises:
        ValueError: torchtitan has another interface, or a layer has no inner attention.
    """
    for name, ours in (("apply_cp_to_forward", apply_ring), ("prepare_context_parallel_input", prepare_ring_input)):
        theirs = _originals.setdefault(name, getattr(context_parallel, name))
        found = " ".join(inspect.signature(theirs).parameters)
        if found != KNOWN[name]:
            raise ValueError(
                f"torchtitan={version('torchtitan')}: {name} has the parameters {found}, Ringspan knows {TESTED}: {KNOWN[name]}"
            )
        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "torchtitan"]:
            if getattr(module, name, None) is theirs:
                setattr(module, name, ours)
    for layer in model_config.layers:
        if not hasattr(getattr(layer, "attention", None), "inner_attention"):
            raise ValueError(f"model_config: {type(layer).__qualname__} has no inner attention; llama3 and qwen3 have one")
        layer.attention.inner_attention = RingspanAttention.Config(window=window)
