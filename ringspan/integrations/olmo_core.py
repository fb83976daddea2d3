"""An attention backend for OLMo-core 3.0, with its interface of context parallelism.

model = config.build(init_device="meta")
ringspan.integrations.olmo_core.use_ringspan(model)          before apply_cp
model.apply_cp(cp_mesh, ring=RingContextParallelStyle())     zig_zag or llama3, with or without doc_lens
"""

import inspect
from typing import Any

import torch
from olmo_core.distributed.parallel.context_parallel import all_to_all_single_cp2hp, all_to_all_single_hp2cp
from olmo_core.nn.attention.backend import AttentionBackend
from olmo_core.nn.attention.ring import RingAttentionLoadBalancerType
from olmo_core.version import VERSION
from torch import Tensor, nn

from ringspan.compat import ring_flash_attn
from ringspan.compat.options import as_window
from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.kernels.varlen import attention_varlen

TESTED = "3.0.0"
KNOWN = (
    "qkv", "cu_doc_lens", "cu_doc_lens_q", "cu_doc_lens_k", "max_doc_len", "max_doc_len_q", "max_doc_len_k", "local_k_slice",
    "kv_cache_manager", "sinks",
)  # fmt: skip


class RingspanAttentionBackend(AttentionBackend):
    """OLMo-core's attention on one GPU, on a ring (zig_zag and llama3 load balancers), or by OLMo-core's Ulysses exchange."""

    @classmethod
    def assert_supported(cls) -> None:
        """Runs on CPUs and GPUs."""

    @classmethod
    def assert_supports_swa(cls) -> None:
        """Windows work, on a ring too."""

    @classmethod
    def assert_supports_ring_cp(cls) -> None:
        """Rings work."""

    @classmethod
    def assert_supports_ulysses_cp(cls) -> None:
        """Ulysses works."""

    @classmethod
    def assert_supports_packed_qkv(cls) -> None:
        """Packed queries, keys and values work."""

    @classmethod
    def assert_supports_kv_cache(cls) -> None:
        raise RuntimeError("RingspanAttentionBackend has no KV cache: generate with the torch or flash backend")

    def forward(
        self,
        qkv: Tensor | tuple[Tensor, Tensor, Tensor],
        cu_doc_lens: Tensor | None = None,
        cu_doc_lens_q: Tensor | None = None,
        cu_doc_lens_k: Tensor | None = None,
        max_doc_len: int | None = None,
        max_doc_len_q: int | None = None,
        max_doc_len_k: int | None = None,
        local_k_slice: slice | None = None,
        kv_cache_manager: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention: qkv (B, T, 3, H, D) or q (B, T, H, D), k and v to (B, T, H, D)."""
        if kv_cache_manager is not None:
            self.assert_supports_kv_cache()
        q, k, v = qkv.unbind(2) if isinstance(qkv, Tensor) else qkv
        ring = self.ring if self.cp_enabled else None
        if ring is not None and sinks is not None:
            raise ValueError("sinks with a ring: their gradient is each rank's part, which OLMo-core does not sum; use Ulysses")
        if ring is None:
            if self.cp_enabled:
                q, k, v = (all_to_all_single_cp2hp(x, self.cp_pg) for x in (q, k, v))
            out = self._on_one_rank(q, k, v, cu_doc_lens, sinks)
            return all_to_all_single_hp2cp(out, self.cp_pg) if self.cp_enabled else out
        options: dict[str, Any] = dict(dropout_p=self.dropout_p, softmax_scale=self.scale, causal=True)
        options |= dict(window_size=tuple(self.window_size), group=self.cp_pg)
        rows: Any = [x.flatten(0, 1) for x in (q, k, v)]
        if ring.load_balancer == RingAttentionLoadBalancerType.llama3:
            lengths: Any = cu_doc_lens_q, cu_doc_lens_k, max_doc_len_q, max_doc_len_k, ring.head_stride, local_k_slice
            return ring_flash_attn.llama3_flash_attn_varlen_func(*rows, *lengths, **options).view_as(q)
        if ring.load_balancer != RingAttentionLoadBalancerType.zig_zag:
            raise ValueError(f"load_balancer={ring.load_balancer}: zig_zag and llama3 work with a ring")
        if cu_doc_lens is None:
            return ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, **options)
        return ring_flash_attn.zigzag_ring_flash_attn_varlen_func(*rows, cu_doc_lens, max_doc_len, **options).view_as(q)

    def _on_one_rank(self, q: Tensor, k: Tensor, v: Tensor, cu_doc_lens: Tensor | None, sinks: Tensor | None) -> Tensor:
        window = as_window(tuple(self.window_size))
        options: dict[str, Any] = dict(scale=self.scale, dropout=self.dropout_p, sinks=sinks)
        if cu_doc_lens is None:
            return attention(q, k, v, Mask(True, window), **options)
        q, k, v, shape = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape
        return attention_varlen(q, k, v, cu_doc_lens.to(torch.int32), causal=True, window=window, **options).view(shape)


def use_ringspan(model: nn.Module) -> int:
    """Replace the attention backends of a model. Call it before `apply_cp`.

    Args:
        model: A model of OLMo-core.

    Returns:
        The number of layers.

    Raises:
        ValueError: OLMo-core has another interface, the model has no attention, or context parallelism has been applied.
    """
    found = tuple(inspect.signature(AttentionBackend.forward).parameters)[1:]
    if found != KNOWN:
        raise ValueError(
            f"ai2-olmo-core={VERSION}: AttentionBackend.forward has the parameters {found}, Ringspan knows {KNOWN} of {TESTED}"
        )
    ring_flash_attn.install()  # the llama3 load balancer imports ring_flash_attn
    layers = [module for module in model.modules() if isinstance(getattr(module, "backend", None), AttentionBackend)]
    if not layers:
        raise ValueError(f"model={type(model).__name__} has no attention with a backend: pass a Transformer of OLMo-core")
    for layer in layers:
        old: Any = layer.backend
        if old.cp_enabled:
            raise ValueError("model has context parallelism already: call use_ringspan before apply_cp")
        names = "head_dim", "n_heads", "n_kv_heads", "scale", "dropout_p", "window_size", "cache"
        layer.backend = RingspanAttentionBackend(**{name: getattr(old, name) for name in names})
    return len(layers)
