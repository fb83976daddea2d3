"""Warp-specialised Gluon kernels for Hopper (sm_90) and the host code that launches them."""
