"""Implementations of a block: `reference` and `chunked` in PyTorch, `triton` (portable), `hopper` (Gluon).

`choose` picks one per call; `block` defines the interface.
"""
