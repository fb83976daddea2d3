"""Benchmarks of the ring: `ringspan bench ring`."""
