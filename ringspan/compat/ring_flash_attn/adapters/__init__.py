"""Adapters of ring-flash-attn: models of transformers."""

from ringspan.compat.ring_flash_attn.adapters.hf_adapter import substitute_hf_flash_attn, update_ring_flash_attn_params

__all__ = ["substitute_hf_flash_attn", "update_ring_flash_attn_params"]
