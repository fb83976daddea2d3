"""Where the tests run: on the GPU if there is one, else with Triton's interpreter. Nothing here may import triton first."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # another worker has the other cores


WITHOUT_RANKS = (  # of tests that take long
    "test_streams", "test_generate", "test_cache", "test_layout", "test_data", "test_evaluate", "test_model", "test_weights",
)  # fmt: skip


def needs_machine(name: str) -> bool:
    """For its ranks. A test that takes long and has none is a worker's like any other."""
    path = Path(name.partition("::")[0])
    return "kernels" not in path.parts and path.stem not in WITHOUT_RANKS


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where pytest has workers, any takes tests of one process; after these all others, which need the machine, go to one."""
    items.sort(key=lambda item: needs_machine(item.nodeid))
    for item in items:
        if needs_machine(item.nodeid):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif item.path.stem == "test_ahead":
            item.add_marker(pytest.mark.xdist_group("compiled once"))
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """pytest-xdist writes groups behind names, which not every pytest allows."""
    grouped = node.config.option.dist == "loadgroup"
    if grouped and any(needs_machine(name) and "@" not in name for name in ids):
        pytest.exit(
            f"With pytest {pytest.__version__} this pytest-xdist gives tests of one group to any worker: install what "
            "constraints.txt names, or leave out -n",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """torch.empty and its like hold NaN, so that a row which nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
