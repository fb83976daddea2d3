"""The doctor's links: what is measured becomes lines that say what it means, and what to do."""

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from ringspan.launch import doctor


def lines_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: Any) -> tuple[list[str], int]:
    def run(*args: Any, **options: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(doctor, "_num_gpus", lambda: 4)
    monkeypatch.setattr(subprocess, "run", run)
    its = doctor.Doctor()
    doctor.links(its)
    return capsys.readouterr().out.splitlines(), its.problems


def printed(*found: dict[str, Any]) -> SimpleNamespace:
    text = "NCCL version 2.28\n" + "".join(json.dumps(line) + "\n" for line in found)
    return SimpleNamespace(returncode=0, stdout=text, stderr="")


def test_fast_links_say_how_long_shards_hide_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a block of n · n takes 5 n² · D FLOPs a head, 12 n · D bytes travel: at 6e14 FLOP/s and 3.6e11 B/s n = 4000."""
    found = dict(way="messages", mib=256, speed=3e11), dict(way="copy engines", mib=256, speed=3.6e11)
    lines, problems = lines_of(monkeypatch, capsys, printed(*found))
    assert problems == 0 and lines == [
        "  ok    messages: 300 GB/s of 256 MiB, all 4 GPUs at once",
        "  ok    copy engines: 360 GB/s of 256 MiB, all 4 GPUs at once",
        "  ok    travel hides behind attention from some 4k tokens a GPU on, with GQA 4:1 from a quarter",
    ]


def test_slow_links_and_missing_copy_engines_name_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dict(way="messages", mib=256, speed=2e10), dict(way="copy engines", error="no peer access")
    lines, problems = lines_of(monkeypatch, capsys, printed(*found))
    assert problems == 0 and "  note  no copy engines (no peer access): parallel.transport=p2p needs none" in lines
    assert "from some 70k tokens a GPU on" in lines[2] and "nvidia-smi topo -m" in lines[3]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (SimpleNamespace(returncode=1, stdout="", stderr="a\nncclSystemError"), "(ncclSystemError)"),
        (SimpleNamespace(returncode=1, stdout="", stderr=""), "(no answer)"),
        (subprocess.TimeoutExpired("torchrun", 300), "(no answer in 300 seconds)"),
    ],
)
def test_gpus_that_do_not_reach_each_other_are_a_problem(
    result: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, problems = lines_of(monkeypatch, capsys, result)
    assert problems == 1 and reason in lines[0] and "NCCL_DEBUG=INFO" in lines[0] and len(lines) == 1
