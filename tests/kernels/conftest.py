"""Tests marked `hopper` run the Hopper kernels on an sm_90 GPU, or in the emulator on a machine without a GPU."""

import pytest
import torch

from ringspan.kernels.runtime.triton_compat import hopper_runs_on
from tests.conftest import HAS_GPU


@pytest.fixture(autouse=True)
def hopper_or_emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("hopper") is None:
        return
    if not HAS_GPU:
        from tests.kernels.backends.hopper.emulator import emulate  # a local import, because it imports triton

        emulate(monkeypatch)
    elif not hopper_runs_on(torch.device("cuda")):
        pytest.skip("needs an sm_90 GPU, or none")
