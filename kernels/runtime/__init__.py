"""Operator registration, launch and call caches, and compatibility with Triton versions."""
