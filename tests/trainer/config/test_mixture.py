"""Shares of the sources of a mixture."""

import pytest

from ringspan.trainer.config.mixture import BLOCK, shares


def test_shares_sum_to_a_block_and_sources_that_are_never_drawn_are_rejected() -> None:
    for weights in ([1], [1, 1, 1], [0.7, 0.2, 0.05, 0.05], [3, 1e-1, 7]):
        assert sum(shares(dict(zip("abcd", weights, strict=False)))) == BLOCK
    with pytest.raises(ValueError, match=r"data.sources.b.weight=1: less than 1 in 1000"):
        shares({"a": 1e6, "b": 1})
    with pytest.raises(ValueError, match=r"one above 0"):
        shares({"a": 0.0})
