"""Coordination of ranks: process groups, argument checks, arrivals, progress and timeouts. Independent of the ring."""
