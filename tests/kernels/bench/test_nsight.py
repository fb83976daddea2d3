"""Nsight Compute's counters, with a script named ncu that prints what the tool would print."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringspan.kernels.bench import __main__ as bench
from ringspan.kernels.bench import nsight, nsight_target
from ringspan.kernels.bench.baselines import DIRECTIONS

UNITS = ",".join(f'"{name}{nsight.SHARE}"' for name in nsight.BUSY.values())
NCU = f"""#!/bin/sh
echo "$@" > {{arguments}}
echo '==PROF== Connected to process'
echo '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",{UNITS}'
echo '"","","byte","byte","ns"{',"%"' * len(nsight.BUSY)}'
echo '"0","first, with a comma","1,000","24","1,000"{',"99.5"' * len(nsight.BUSY)}'
echo '"1","second","2000","0","3000","81","72.5","63","30","12.25","{{dram}}"'
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a script as ncu on the PATH; it writes its arguments into the returned file."""

    def install(script: str = NCU, dram: str = "5") -> Path:
        tool, arguments = tmp_path / "ncu", tmp_path / "arguments"
        tool.write_text(script.format(arguments=arguments, dram=dram))
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return arguments

    return install


def rows() -> list[dict]:
    return [
        dict(shape="tiny", kernel=kernel, status=status)
        for kernel, status in (("triton", "ok"), ("hopper", "wrong"), ("fa4", "ok"))
    ]


def test_bytes_are_of_all_kernels_and_utilisation_is_of_the_longest(ncu) -> None:
    arguments = ncu()
    counters = nsight.profile_call("tiny", "triton", "backward", "bf16")
    busy = dict(zip(nsight.BUSY, (0.81, 0.725, 0.63, 0.3, 0.1225, 0.05), strict=True))
    assert counters == dict(dram_bytes=3024, longest="second", longest_share=0.75, busy=busy)
    assert arguments.read_text().split()[-6:] == [
        "-m",
        "ringspan.kernels.bench.nsight_target",
        "tiny",
        "triton",
        "backward",
        "bf16",
    ]


def test_measured_rows_get_counters(ncu) -> None:
    ncu()
    all_rows, some_rows = rows(), rows()
    assert nsight.add_counters(all_rows, "bf16").startswith("ncu: of one call")
    assert all_rows[0]["forward_dram_bytes"] == all_rows[2]["backward_dram_bytes"] == 3024
    assert "forward_busy" not in all_rows[1]  # a wrong kernel is not counted
    text = nsight.report(all_rows)
    assert "tiny fa4 backward" in text and "tiny hopper" not in text and " 81%" in text and " 72%" in text
    nsight.add_counters(some_rows, "bf16", ("triton",))
    assert "forward_busy" in some_rows[0] and "forward_busy" not in some_rows[2]


def test_a_missing_ncu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    measured = rows()
    assert "not on the PATH" in nsight.add_counters(measured, "bf16") and measured == rows()


def test_ncu_runs_the_target_of_this_installation(ncu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a folder without a checkout: -m finds ringspan in the working folder of the child process."""
    ncu(NCU.replace("echo '==PROF==", "pwd > {arguments}; echo '==PROF=="))
    monkeypatch.chdir(tmp_path)
    nsight.profile_call("tiny", "triton", "backward", "bf16")
    folder = Path((tmp_path / "arguments").read_text().strip())
    assert (folder / "ringspan/kernels/bench/nsight_target.py").exists()


@pytest.mark.parametrize(
    "script, dram, reason",
    [
        ("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM no permission'\nexit 1\n", "", "ERR_NVGPUCTRPERM"),
        ("#!/bin/sh\necho '==WARNING== No kernels were profiled.'\n", "", "no kernel was profiled"),
        (NCU, "n/a", "does not count every metric"),
        (NCU.replace("lts__throughput", "lts__else"), "5", "lts__throughput"),
    ],
)
def test_failures_of_ncu_are_reported(script: str, dram: str, reason: str, ncu) -> None:
    ncu(script, dram)
    measured = rows()
    assert reason in nsight.add_counters(measured, "bf16") and measured == rows()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_call_is_profiled(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run(q, k, v, shape):
        calls.append("forward")
        out = q * k.mean() * v.mean()
        out.register_hook(lambda grad: calls.append("backward"))
        return out

    monkeypatch.setattr(nsight_target, "DEVICE", "cpu")
    monkeypatch.setattr(nsight_target, "kernels", lambda: {"triton": SimpleNamespace(run=run)})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    nsight_target.main("tiny", "triton", direction, "fp32")
    start = calls.index("start")
    assert calls[start:] == ["start", direction, "stop"] and {"forward", "backward"} <= set(calls[:start])


@pytest.mark.parametrize("flag", ["--roofline", "--counters"])
def test_counters_are_part_of_the_benchmark(flag: str, ncu, tmp_path: Path, monkeypatch, capsys) -> None:
    """The benchmark's path for GPUs, with kernels on the CPU."""
    ncu()
    about = {"device": "NVIDIA H200", "date": "2026-01-01", "commit": None, "versions": {}}
    monkeypatch.setattr(bench, "machine", lambda device: about)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "NVIDIA_ONLY", {})
    path = tmp_path / "result.json"
    argv = ["--device", "cpu", "--dtype", "bf16", "--shapes", "tiny", "--only", "chunked,sdpa-flash"]
    argv += ["--rep", "1", "--rounds", "1"]
    assert bench.main([*argv, flag, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["command"].endswith(flag)
    by_kernel = {row["kernel"]: row for row in written["rows"]}
    assert by_kernel["chunked"]["forward_dram_bytes"] == 3024 and by_kernel["sdpa-flash"]["status"] == "ok"
    assert ("forward_busy" in by_kernel["sdpa-flash"]) is (flag == "--counters")  # the roofline has no model of sdpa-flash
    out = capsys.readouterr().out
    assert "ncu: of one call" in out and ("bound by" in out) is (flag == "--roofline")
    assert ("tensor cores" in out) is (flag == "--counters")


def test_a_roofline_of_fp32_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "machine", lambda device: {"device": "NVIDIA H200", "date": "", "commit": None, "versions": {}})
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--dtype", "fp32", "--roofline"])
    assert "--dtype bf16" in capsys.readouterr().err
