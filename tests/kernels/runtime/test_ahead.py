"""Portable means that it compiles: every kernel for every chip, within its shared memory and without spilling."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.runtime import compat as versions
from tests.kernels.runtime.ahead import (
    CONFIGURATIONS,
    GLUON,
    MAY_SPILL,
    NAMED,
    ON_HOPPER,
    RELOADS_NOTHING,
    SPILL_MORE,
    goes_ahead,
    reloads,
    wrong,
)

SHARES = (("hopper", "sm_80"), ("sm_90", "sm_100", "gfx942"))  # about as long each


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """By two processes at once, as compiling uses one core."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.runtime.ahead", *groups], env=environment, stdout=subprocess.PIPE, text=True
        )
        for groups in SHARES
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "their errors are above"
    return {name: kernel for text in said for name, kernel in json.loads(text.splitlines()[-1]).items()}


def test_the_list_is_complete(compiled: dict[str, dict]) -> None:
    assert sorted(compiled) == sorted(NAMED) and {*ON_HOPPER, *GLUON} == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", NAMED)
def test_fits_the_chip(name: str, compiled: dict[str, dict]) -> None:
    assert not wrong(name, compiled[name]), compiled[name]


GOOD = {"shared": 1024, "registers": 168, "spills": 0, "warpgroup": True, "log": "", "ahead": "", "reloads": 0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(), ""),
        (dict(error="CompilationError: no"), "CompilationError"),
        (dict(shared=227 * 1024 + 1), "shared memory above 232448"),
        (dict(spills=8), "spills above 0"),
        (dict(log="ptxas info: Potential Performance Loss: wgmma are serialized"), "serialized"),
        (dict(warpgroup=False), "not used"),
        (dict(ahead="this beside that"), "wait for its party: this beside that"),
    ],
)
def test_what_is_wrong_is_said(change: dict, says: str) -> None:
    found = wrong("hopper/d64-causal/attention_forward", GOOD | change)
    assert says in found and bool(found) == bool(change)


def test_reads_of_spilled_registers_in_a_loop_are_found() -> None:
    """By versions that have had none; of a loop around loops only what is in these counts."""
    assert {*RELOADS_NOTHING} <= {*NAMED}
    for version, found in (("3.6.0", True), ("3.7.1", True), ("3.8.0", False)):
        assert bool(wrong("hopper/d128-sums/attention_backward", GOOD | dict(reloads=1), version)) == found
    text = "0010 LDL R1, [R1]|0020 HGMMA R2|0030 {}|0040 @P0 BRA 0x20|0050 LDL R1, [R1]|0060 @!P1 BRA 0x10|0070 BRA 0x30"
    for inside, count in (("IADD3 R1", 0), ("LDL.LU R9, [R1+0x4]", 1), ("@P1 LDL R9, [R1]", 1)):
        lines = (line.split(" ", 1) for line in text.format(inside).split("|"))
        assert reloads("".join(f"        /*{at}*/    {what} ;\n" for at, what in lines)) == count
    assert reloads("        /*0010*/    EXIT ;\n") == 0
    with pytest.raises(ValueError, match="no loop"):
        reloads("        /*0010*/    HGMMA R2 ;\n")


READS = "\tld.shared.b32 %r1, [%r2];"
ARRIVES = "\t@%p3 mbarrier.arrive.shared::cta.b64 _, [%r4];"
SENDS = "\t@%p18 cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1}], [%r2];"
WAITS = "\tcp.async.bulk.wait_group.read 1;"
WRITES = "\tst.shared.v2.b32 [%r1], {%r2, %r3};"
LEAVES = "\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};"
MEETS = "\tbar.sync \t2, 128;"
WARP_MEETS, BEGINS = "\tbar.warp.sync \t-1;", "\tbarrier.sync \t1;"


@pytest.mark.parametrize("ahead", [(READS, ARRIVES), (WRITES, SENDS), (LEAVES, SENDS), (WAITS, WRITES), (WAITS, LEAVES)])
def test_a_thread_that_goes_ahead_of_its_party_is_found(ahead: tuple[str, str]) -> None:
    first, second = ahead
    assert goes_ahead("\n".join([MEETS, first, "\tmov.u32 %r1, 0;", second, MEETS, SENDS]))
    assert not goes_ahead("\n".join([MEETS, first, MEETS, second, MEETS, SENDS]))
    assert goes_ahead("\n".join([MEETS, first, WARP_MEETS, second, MEETS, SENDS]))
    assert "no arrival" in goes_ahead("setmaxnreg.dec.sync.aligned.u32 24;") and "no copy" in goes_ahead(f"{MEETS}\n{WAITS}")
    assert not goes_ahead("\n".join([BEGINS, WRITES, WARP_MEETS, ARRIVES, BEGINS]))  # a party of one warp


def test_versions_that_spill_more_are_named() -> None:
    kernel = GOOD | dict(spills=8)
    assert not wrong("hopper/d128-softcap/attention_forward", kernel, "3.9.1")
    assert wrong("hopper/d128-softcap/attention_forward", kernel, "3.6.0")
    for more in SPILL_MORE.values():
        assert all(name in NAMED and size > MAY_SPILL.get(name, 0) for name, size in more.items())
    assert set(SPILL_MORE) <= set(versions.VERSIONS) and set(MAY_SPILL) <= set(NAMED)


def test_the_list_for_all_versions_is_short(capsys: pytest.CaptureFixture) -> None:
    assert 30 <= len(versions.KERNELS) <= 45
    results = dict.fromkeys(versions.KERNELS, GOOD)
    lines, well = versions.rows("3.6", {name: kernel | dict(warpgroup=True) for name, kernel in results.items()})
    assert well and len(lines) == len(results) and all(line.endswith("ok") for line in lines)
    lines, well = versions.rows("3.6", results | {versions.KERNELS[0]: GOOD | dict(spills=4096)})
    assert not well and "spills above" in lines[0]
    lines, well = versions.rows("3.6", {})
    assert not well and all("was not compiled" in line for line in lines)
    with pytest.raises(SystemExit, match=r"3\.6, 3\.7, 3\.8, 3\.9"):
        versions.main(["2.0"])


def test_a_version_that_pip_does_not_have_is_a_failure(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    done = subprocess.CompletedProcess([], 1, "", "ERROR: no such version")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    assert versions.main(["3.9"]) == 1
    assert capsys.readouterr().out.count("ERROR: no such version") == len(versions.KERNELS)
