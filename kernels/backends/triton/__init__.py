"""Portable Triton kernels (FlashAttention-2 structure) and the host code that launches them."""
