"""Benchmarks of the ring: `torchrun … -m ringspan.parallel.bench` and, on one GPU, `ringspan bench rehearse`."""
