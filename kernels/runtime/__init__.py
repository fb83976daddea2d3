"""Operator registration, caches of validated calls and compiled launches, and compatibility with Triton versions."""
