"""Interfaces of other attention packages, with Ringspan's kernels and ring: a script changes one import.

    ringspan.compat.flash_attn          flash_attn 2.8, one GPU
    ringspan.compat.ring_flash_attn     ring-flash-attn 0.1.8
    ringspan.compat.ulysses_sp          DeepSpeed's UlyssesSPAttentionHF and its data-loader adapter (ALST, accelerate)

Signatures, layouts and results are those of the packages, which need not be installed. An option that Ringspan lacks raises.
"""
