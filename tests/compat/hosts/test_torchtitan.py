"""ringspan.integrations.torchtitan with the installed torchtitan: a training step on two ranks equals one on one rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from ringspan.integrations import torchtitan as integration
from tests.compat.hosts import torchtitan_jobs
from tests.parallel.helpers.pool import Pool

CLOSE = 1e-5


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2, timeout=60)
    yield pool
    pool.close()


def test_one_rank_equals_torchtitans_attention() -> None:
    assert torchtitan_jobs.one_rank() < CLOSE


@pytest.mark.parametrize(("packed", "balancer"), [(False, "headtail"), (True, "headtail"), (True, None)])
def test_a_step_on_two_ranks_equals_one_on_one_rank(packed: bool, balancer: str | None, two_ranks: Pool) -> None:
    """Loss and gradients in fp32 through parallelize_llama, with FSDP2; documents of any lengths."""
    for difference in two_ranks(torchtitan_jobs.context_parallel, packed, balancer):
        assert difference < CLOSE


def test_what_does_not_work_is_named() -> None:
    with pytest.raises(ValueError, match=r"q has 8 tokens, k has 16: .*spmd_backend='partial_dtensor'"):
        torchtitan_jobs.wrong_backend()
    x = torch.randn(1, 8, 2, 16)
    layer: Any = integration.RingspanAttention.Config().build()
    with pytest.raises(ValueError, match="out_transform: not supported by RingspanAttention"):
        layer(x, x, x, out_transform=lambda out, lse: out)
    with pytest.raises(ValueError, match="attention_masks=int: VarlenMetadata or None work"):
        layer(x, x, x, attention_masks=3)


def test_a_changed_torchtitan_is_one_line_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(modules: Any) -> None: ...

    monkeypatch.setitem(integration._originals, "apply_cp_to_forward", changed)
    with pytest.raises(ValueError, match=r"^torchtitan=.*apply_cp_to_forward has the parameters modules, Ringspan knows 0.3.0"):
        integration.use_ringspan(torchtitan_jobs.llama3._debugmodel("flex"))
