"""Warp-specialised Gluon kernels for sm_90 and their host code."""
