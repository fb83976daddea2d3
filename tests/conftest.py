"""Where the tests run: on the GPU if there is one, else with Triton's interpreter. Nothing here may import triton first."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # another worker has the other cores


# The longest files first, so that both workers end at about the same time.
FIRST = (
    "test_run", "test_blocks", "test_ring", "test_streams", "test_launch", "test_parity", "test_on_cpu", "test_resume",
    "test_backends", "test_ahead", "test_ring_attention", "test_faults",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, of which each worker takes the next; skip GPU tests without a GPU."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Fill new tensors with NaN, so that a row that is never written fails the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
