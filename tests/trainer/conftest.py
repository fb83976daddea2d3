"""The trainer as it runs on a user's CPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def users_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without Triton's interpreter, in which attention's backward would spend nearly all of the time, and on one thread.

    At these sizes a second thread gains nothing, and where other processes hold the cores it spins for them.
    """
    monkeypatch.setattr("kernels.compat.INTERPRETED", False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
