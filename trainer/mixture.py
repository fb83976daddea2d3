"""How many samples each source of a mixture has. Without torch, for the check before the start asks it too."""

BLOCK = 1000  # samples in which each source's share is exact


def shares(weights: dict[str, float]) -> list[int]:
    """How many of a block's samples each source has: in proportion to the weights, by largest remainder."""
    total = sum(weights.values())
    if not total > 0 or min(weights.values()) < 0:
        raise ValueError(f"data.sources have the weights {weights}: they must be at least 0, and one above 0")
    exact = [BLOCK * weight / total for weight in weights.values()]
    counts = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: BLOCK - sum(counts)]:
        counts[i] += 1
    for (name, weight), count in zip(weights.items(), counts, strict=True):
        if weight > 0 and count == 0:
            raise ValueError(
                f"data.sources.{name}.weight={weight:g}: less than 1 in {BLOCK} of all weights is never drawn; "
                f"give more, or leave it out: ~data.sources.{name}"
            )
    return counts
