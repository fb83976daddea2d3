"""Benchmarks of attention on one GPU: `ringspan bench kernels` and `ringspan bench tune`."""
