"""Transports: how K/V and gradients move between ranks. `base` is the interface; `p2p` and `copy_engine` implement it."""
