"""Portable Triton kernels (FlashAttention-2 structure) and their host code."""
