"""ringspan.compat on two GPUs in bf16: the ring rule, RMS error of out, dq, dk and dv at most 1.05 times that of one GPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.compat import ring_jobs
from tests.compat.ring_jobs import CompatCase
from tests.parallel.helpers.pool import Pool

pytestmark = pytest.mark.gpu
WINDOW = (("causal", True), ("window_size", (700, 0)))
CASES = [
    CompatCase("ring_flash_attn", (4096,), heads=(8, 2), width=128),
    CompatCase("zigzag_ring_flash_attn", (4096,), heads=(8, 2), width=128),
    CompatCase("zigzag_ring_flash_attn", (4096,), WINDOW, heads=(8, 8), width=64),
    CompatCase("stripe_flash_attn", (4096,), heads=(8, 2), width=128),
    CompatCase("ring_flash_attn_varlen", (1024, 0, 2048, 1020), heads=(8, 2), width=128),
    CompatCase("zigzag_ring_flash_attn_varlen", (1024, 0, 2048, 1020), WINDOW, heads=(8, 2), width=128),
    CompatCase("zigzag_ring_flash_attn_varlen", (701, 1, 0, 1500, 37, 1857), heads=(8, 2), width=128, whole=True),
    CompatCase("llama3_flash_attn_varlen", (701, 1, 0, 1500, 37, 1857), heads=(8, 2), width=128),
]


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Pool]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pool = Pool(2, "nccl", 120, on_gpus=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}-{len(case.lengths)}-{dict(case.options)}")
def test_two_gpus_are_as_accurate_as_one(case: CompatCase, two_gpus: Pool) -> None:
    for errors in two_gpus(ring_jobs.rms_errors, case, patience=300):
        for name, (ring_error, single_error) in errors.items():
            assert 0 < ring_error <= 1.05 * single_error, f"{name}: {ring_error:.3e}, one GPU {single_error:.3e}"
