"""ringspan.integrations.olmo_core with the installed OLMo-core: a training step on two ranks equals one on one rank."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("olmo_core")

from ringspan.integrations import olmo_core
from tests.compat.hosts import olmo_jobs
from tests.parallel.helpers.pool import Pool

CLOSE = 1e-5


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2, timeout=60)
    yield pool
    pool.close()


@pytest.mark.parametrize("window", [False, True])
def test_one_rank_equals_olmo_cores_attention(window: bool) -> None:
    assert olmo_jobs.one_rank(window) < CLOSE


@pytest.mark.parametrize(
    ("style", "packed", "window"),
    [
        ("zig_zag", False, False),
        ("zig_zag", True, False),
        ("zig_zag", False, True),
        ("llama3", True, False),
        ("ulysses", False, True),
    ],
)
def test_a_step_on_two_ranks_equals_one_on_one_rank(style: str, packed: bool, window: bool, two_ranks: Pool) -> None:
    """Loss and gradients in fp32; windows, which OLMo-core refuses with zig_zag, and documents of odd lengths."""
    for difference in two_ranks(olmo_jobs.context_parallel, style, packed, window):
        assert difference < CLOSE


def test_a_changed_olmo_core_is_one_line_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, qkv: Any) -> None: ...

    model = olmo_jobs.make_model(False)
    monkeypatch.setattr(olmo_core.AttentionBackend, "forward", changed)
    with pytest.raises(ValueError, match=r"^ai2-olmo-core=.*AttentionBackend.forward has the parameters .* of 3.0.0$"):
        olmo_core.use_ringspan(model)


def test_a_model_without_attention_is_named() -> None:
    import torch

    with pytest.raises(ValueError, match="model=Linear has no attention with a backend"):
        olmo_core.use_ringspan(torch.nn.Linear(2, 2))
