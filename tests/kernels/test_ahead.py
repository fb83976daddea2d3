"""Portable means that it compiles: every kernel for every chip, within its shared memory and without spilling."""

import json
import os
import subprocess
import sys

import pytest

from .ahead import CHIPS, CONFIGURATIONS, EVERYWHERE, GLUON, ON_HOPPER

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkdv")
NAMED = [
    f"{chip}/{name}/{kernel}" for chip in CHIPS for name in (ON_HOPPER if chip == "sm_90" else EVERYWHERE) for kernel in KERNELS
]
NAMED += [f"hopper/{name}/attention_forward" for name in GLUON]
NAMED += [f"hopper/{name}/attention_backward" for name in GLUON if name not in ("d256-causal", "d192-128")]
# Bytes a thread may spill; whatever is not named here may spill nothing. These tiles were measured to be faster than smaller
# ones that do not spill (d64, d128, d256), or hold more than any tile leaves room for.
MAY_SPILL = {
    "sm_90/d64-causal/attention_backward_dq": 16,
    "sm_90/d128-causal/attention_forward": 16,
    "sm_90/d128-causal/attention_backward_dkdv": 64,
    "sm_90/d256-causal/attention_backward_dkdv": 384,
    "sm_90/d192-128/attention_backward_dkdv": 384,
    "sm_90/d128-fp32/attention_backward_dq": 32,
    "sm_90/d128-fp32/attention_backward_dkdv": 32,
    "sm_90/d128-ring/attention_forward": 128,
    "sm_90/d128-ring/attention_backward_dkdv": 384,
    "sm_90/d128-softcap/attention_backward_dkdv": 64,
    "sm_90/d128-dropout/attention_backward_dq": 64,
    "sm_90/d128-dropout/attention_backward_dkdv": 64,
    "hopper/d64-causal/attention_backward": 80,
    "hopper/d128-causal/attention_forward": 16,
    "hopper/d128-causal/attention_backward": 8,
    "hopper/d256-causal/attention_forward": 32,
    "hopper/d192-128/attention_forward": 16,
    "hopper/d128-ring/attention_forward": 48,
    "hopper/d128-ring/attention_backward": 8,
    "hopper/d128-softcap/attention_backward": 184,
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.kernels.ahead"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_the_list_is_complete(compiled: dict[str, dict]) -> None:
    assert sorted(compiled) == sorted(NAMED) and set(ON_HOPPER) == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", NAMED)
def test_fits_the_chip(name: str, compiled: dict[str, dict]) -> None:
    kernel = compiled[name]
    assert kernel["shared"] <= CHIPS.get(name.split("/")[0], CHIPS["sm_90"])
    assert "serialized" not in kernel["log"], "products wait for each other"
    assert kernel["spills"] <= MAY_SPILL.get(name, 0), kernel
    if name.startswith("sm_90/") and "fp32" not in name:
        assert kernel["warpgroup"], "Hopper's products are not used"
