"""Ahead-of-time compilation: every kernel compiles for every chip, within its shared memory and its limits of spills."""

import json
import os
import subprocess
import sys

import pytest

from ringspan.kernels.backends.choose import MIN_SHARED_MEMORY
from tests.kernels.runtime import compat
from tests.kernels.runtime.ahead import (
    CONFIGURATIONS,
    GLUON,
    KERNEL_NAMES,
    KERNELS,
    NO_RELOADS,
    SM_90,
    SPILL_LIMITS,
    SPILL_LIMITS_BY_VERSION,
    missing_barrier,
    problems,
    reloads,
)

GROUPS = (("hopper", "sm_80"), ("sm_90", "sm_100", "gfx942"))  # of about the same compilation time
EXHAUSTIVE = ("sm_80", "sm_90", "sm_100", "gfx942")  # only "hopper", the Gluon kernels, in `make test`


def chip_of(name: str) -> str:
    return name.partition("/")[0]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, dict]:
    """Resources of the selected kernels, compiled by two processes, because compilation uses one core."""
    users = [item for item in request.session.items if item.path == request.path and "compiled" in item.fixturenames]
    names = {item.callspec.params["name"] for item in users}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.runtime.ahead", *group], env=environment, stdout=subprocess.PIPE, text=True
        )
        for group in (sorted(name for name in names if chip_of(name) in group) for group in GROUPS)
        if group
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "a process failed; its error is printed above"
    kernels = {name: kernel for text in outputs for name, kernel in json.loads(text.splitlines()[-1]).items()}
    assert kernels.keys() == names
    return kernels


def test_each_configuration_is_compiled_for_hopper() -> None:
    assert {*SM_90, *GLUON} == set(CONFIGURATIONS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (chip_of(name) in EXHAUSTIVE)) for name in KERNEL_NAMES]
)
def test_a_kernel_is_within_the_limits_of_the_chip(name: str, compiled: dict[str, dict]) -> None:
    assert not problems(name, compiled[name]), compiled[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [f"sm_90/d128-fp32/{kernel}" for kernel in KERNELS])
def test_fp32_needs_no_more_shared_memory_than_choose_asks_for(name: str, compiled: dict[str, dict]) -> None:
    """Its tiles are those of all chips."""
    assert compiled[name]["shared"] <= MIN_SHARED_MEMORY


GOOD = {"shared": 1024, "registers": 168, "spills": 0, "warpgroup": True, "log": "", "missing_barrier": "", "reloads": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(), ""),
        (dict(error="CompilationError: no"), "CompilationError"),
        (dict(shared=227 * 1024 + 1), "shared memory above 232448"),
        (dict(spills=8), "spills above 0"),
        (dict(log="ptxas info: Potential Performance Loss: wgmma are serialized"), "serialized"),
        (dict(warpgroup=False), "wgmma is not used"),
        (dict(missing_barrier="this without that"), "barrier is missing in a partition: this without that"),
    ],
)
def test_each_problem_is_reported(change: dict, message: str) -> None:
    report = problems("hopper/d64-causal/attention_forward", GOOD | change)
    assert message in report and bool(report) == bool(change)


def test_reloads_of_spilled_registers_in_a_loop_are_found() -> None:
    """Reported for versions that have none; only innermost loops count."""
    assert {*NO_RELOADS} <= {*KERNEL_NAMES}
    for version, is_reported in (("3.6.0", True), ("3.7.1", True), ("3.8.0", False)):
        assert bool(problems("hopper/d128-sums/attention_backward", GOOD | dict(reloads=1), version)) == is_reported
    listing = "0010 LDL R1, [R1]|0020 HGMMA R2|0030 {}|0040 @P0 BRA 0x20|0050 LDL R1, [R1]|0060 @!P1 BRA 0x10|0070 BRA 0x30"
    for inside, count in (("IADD3 R1", 0), ("LDL.LU R9, [R1+0x4]", 1), ("@P1 LDL R9, [R1]", 1)):
        lines = (line.split(" ", 1) for line in listing.format(inside).split("|"))
        assert reloads("".join(f"        /*{at}*/    {text} ;\n" for at, text in lines)) == count
    assert reloads("        /*0010*/    EXIT ;\n") == 0
    with pytest.raises(ValueError, match="no loop"):
        reloads("        /*0010*/    HGMMA R2 ;\n")


READ = "\tld.shared.b32 %r1, [%r2];"
ARRIVE = "\t@%p3 mbarrier.arrive.shared::cta.b64 _, [%r4];"
COPY_OUT = "\t@%p18 cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1}], [%r2];"
WAIT = "\tcp.async.bulk.wait_group.read 1;"
WRITE = "\tst.shared.v2.b32 [%r1], {%r2, %r3};"
MATRIX_WRITE = "\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};"
BARRIER = "\tbar.sync \t2, 128;"
WARP_BARRIER, PARTITION_BARRIER = "\tbar.warp.sync \t-1;", "\tbarrier.sync \t1;"


@pytest.mark.parametrize(
    ("first", "second"),
    [(READ, ARRIVE), (WRITE, COPY_OUT), (MATRIX_WRITE, COPY_OUT), (WAIT, WRITE), (WAIT, MATRIX_WRITE)],
)
def test_a_missing_barrier_is_found(first: str, second: str) -> None:
    assert missing_barrier("\n".join([BARRIER, first, "\tmov.u32 %r1, 0;", second, BARRIER, COPY_OUT]))
    assert not missing_barrier("\n".join([BARRIER, first, BARRIER, second, BARRIER, COPY_OUT]))
    assert missing_barrier("\n".join([BARRIER, first, WARP_BARRIER, second, BARRIER, COPY_OUT]))
    assert "no arrival" in missing_barrier("setmaxnreg.dec.sync.aligned.u32 24;")
    assert "no copy" in missing_barrier(f"{BARRIER}\n{WAIT}")
    one_warp = [PARTITION_BARRIER, WRITE, WARP_BARRIER, ARRIVE, PARTITION_BARRIER]
    assert not missing_barrier("\n".join(one_warp))


def test_spill_limits_depend_on_the_version() -> None:
    kernel = GOOD | dict(spills=8)
    assert not problems("hopper/d128-softcap/attention_forward", kernel, "3.9.1")
    assert problems("hopper/d128-softcap/attention_forward", kernel, "3.6.0")
    for limits in SPILL_LIMITS_BY_VERSION.values():
        assert all(name in KERNEL_NAMES and size > SPILL_LIMITS.get(name, 0) for name, size in limits.items())
    assert set(SPILL_LIMITS_BY_VERSION) <= set(compat.VERSIONS) and set(SPILL_LIMITS) <= set(KERNEL_NAMES)


def test_compat_compiles_few_kernels_and_reports_each_failure(capsys: pytest.CaptureFixture) -> None:
    assert 30 <= len(compat.KERNELS) <= 45
    results = dict.fromkeys(compat.KERNELS, GOOD)
    lines, passed = compat.rows("3.6", {name: kernel | dict(warpgroup=True) for name, kernel in results.items()})
    assert passed and len(lines) == len(results) and all(line.endswith("ok") for line in lines)
    lines, passed = compat.rows("3.6", results | {compat.KERNELS[0]: GOOD | dict(spills=4096)})
    assert not passed and "spills above" in lines[0]
    lines, passed = compat.rows("3.6", {})
    assert not passed and all("was not compiled" in line for line in lines)
    with pytest.raises(SystemExit, match=r"3\.6, 3\.7, 3\.8, 3\.9"):
        compat.main(["2.0"])


def test_a_version_that_pip_cannot_install_is_a_failure(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    process = subprocess.CompletedProcess([], 1, "", "ERROR: no such version")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: process)
    assert compat.main(["3.9"]) == 1
    assert capsys.readouterr().out.count("ERROR: no such version") == len(compat.KERNELS)
