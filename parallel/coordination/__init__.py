"""Process groups, argument checks across ranks, progress and timeouts. Knows nothing of the ring."""
