"""Nsight Compute's counters, by a program of its name that prints what it would print."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringspan.kernels.bench import __main__ as bench
from ringspan.kernels.bench import nsight, nsight_target
from ringspan.kernels.bench.baselines import WAYS

UNITS = ",".join(f'"{name}{nsight.SHARE}"' for name in nsight.BUSY.values())
NCU = f"""#!/bin/sh
echo "$@" > {{seen}}
echo '==PROF== Connected to process'
echo '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",{UNITS}'
echo '"","","byte","byte","ns"{',"%"' * len(nsight.BUSY)}'
echo '"0","first, with a comma","1,000","24","1,000"{',"99.5"' * len(nsight.BUSY)}'
echo '"1","second","2000","0","3000","81","72.5","63","30","12.25","{{dram}}"'
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program there, which writes its arguments into a file; this file."""

    def put(script: str = NCU, dram: str = "5") -> Path:
        tool, seen = tmp_path / "ncu", tmp_path / "seen"
        tool.write_text(script.format(seen=seen, dram=dram))
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return seen

    return put


def rows() -> list[dict]:
    return [
        dict(shape="tiny", kernel=kernel, status=status)
        for kernel, status in (("triton", "ok"), ("hopper", "wrong"), ("fa4", "ok"))
    ]


def test_bytes_are_of_all_kernels_and_busy_is_the_longest(ncu) -> None:
    seen = ncu()
    found = nsight.counters("tiny", "triton", "backward", "bf16")
    busy = dict(zip(nsight.BUSY, (0.81, 0.725, 0.63, 0.3, 0.1225, 0.05), strict=True))
    assert found == dict(dram_bytes=3024, longest="second", longest_share=0.75, busy=busy)
    assert seen.read_text().split()[-6:] == ["-m", "ringspan.kernels.bench.nsight_target", "tiny", "triton", "backward", "bf16"]


def test_rows_that_were_measured_are_counted(ncu) -> None:
    ncu()
    of_all, of_one = rows(), rows()
    assert nsight.count(of_all, "bf16").startswith("ncu: of one call")
    assert of_all[0]["forward_dram_bytes"] == of_all[2]["backward_dram_bytes"] == 3024
    assert "forward_busy" not in of_all[1]  # a wrong kernel's counters are nothing to know
    text = nsight.report(of_all)
    assert "tiny fa4 backward" in text and "tiny hopper" not in text and " 81%" in text and " 72%" in text
    nsight.count(of_one, "bf16", ("triton",))
    assert "forward_busy" in of_one[0] and "forward_busy" not in of_one[2]


def test_without_ncu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = rows()
    assert "not on the PATH" in nsight.count(given, "bf16") and given == rows()


@pytest.mark.parametrize(
    "script, dram, says",
    [
        ("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM no permission'\nexit 1\n", "", "ERR_NVGPUCTRPERM"),
        ("#!/bin/sh\necho '==WARNING== No kernels were profiled.'\n", "", "no kernel was profiled"),
        (NCU, "n/a", "not everything is counted"),
        (NCU.replace("lts__throughput", "lts__else"), "5", "lts__throughput"),
    ],
)
def test_why_ncu_did_not_count_is_said(script: str, dram: str, says: str, ncu) -> None:
    ncu(script, dram)
    given = rows()
    assert says in nsight.count(given, "bf16") and given == rows()


@pytest.mark.parametrize("way", WAYS)
def test_what_ncu_looks_at_is_one_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    nsight_target.main("tiny", "triton", way, "fp32")
    assert calls[calls.index("start") :] == ["start", way, "stop"] and {"forward", "backward"} <= set(
        calls[: calls.index("start")]
    )


@pytest.mark.parametrize("flag", ["--roofline", "--counters"])
def test_counted_in_the_same_run(flag: str, ncu, tmp_path: Path, monkeypatch, capsys) -> None:
    """As on a GPU, except that the CPU computes."""
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
    found = {row["kernel"]: row for row in written["rows"]}
    assert found["chunked"]["forward_dram_bytes"] == 3024 and found["sdpa-flash"]["status"] == "ok"
    assert ("forward_busy" in found["sdpa-flash"]) is (flag == "--counters")  # no algorithm of the roofline
    out = capsys.readouterr().out
    assert "ncu: of one call" in out and ("bound by" in out) is (flag == "--roofline")
    assert ("tensor cores" in out) is (flag == "--counters")


def test_a_chip_without_peaks_has_no_roofline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "machine", lambda device: {"device": "NVIDIA H200", "date": "", "commit": None, "versions": {}})
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--dtype", "fp32", "--roofline"])
    assert "--dtype bf16" in capsys.readouterr().err
