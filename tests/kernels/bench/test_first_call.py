"""`ringspan bench first-call`: what it measures, writes and rejects."""

import json
from pathlib import Path

import pytest

from ringspan.kernels.bench import first_call


def test_both_ways_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    measured = []

    def measure(name: str, options: list[str], cache: str) -> list[dict[str, float]]:
        assert Path(cache).is_dir() and not list(Path(cache).iterdir())
        measured.append((name, *options))
        return [dict(forward_s=2.0, backward_s=1.0), dict(forward_s=0.25, backward_s=0.125)]

    monkeypatch.setattr(first_call, "measure", measure)
    path = tmp_path / "first.json"
    assert first_call.main(["tiny", "d128-causal-4k", "--target", "sm_90", "--compare", "--rounds=2", "--json", str(path)]) == 0
    target = ("--target", "sm_90")
    ways = [(name, *target, *flag) for name in ("tiny", "d128-causal-4k") for flag in ((), ("--sequential",)) * 2]
    assert measured == ways
    result = json.loads(path.read_text())
    assert [row["cache"] for row in result["rows"]] == ["cold", "cached"] * 8
    assert [row["sequential"] for row in result["rows"]] == [False, False, True, True] * 4
    assert "d128-causal-4k       cold      2.00   1.00   3.00  sequential" in capsys.readouterr().out


@pytest.mark.slow
def test_a_full_cache_is_faster_than_an_empty_one(tmp_path: Path) -> None:
    cold, cached = first_call.measure("tiny", ["--target", "sm_90"], str(tmp_path))
    assert list(tmp_path.rglob("*.cubin"))
    assert sum(cached.values()) < sum(cold.values()) / 2


@pytest.mark.gpu
def test_a_first_call_is_timed_on_a_gpu(tmp_path: Path) -> None:
    cold, cached = first_call.measure("tiny", [], str(tmp_path))
    assert 0 < cached["forward_s"] < cold["forward_s"]


def test_a_child_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)tiny: .*invalid choice"):
        first_call.measure("tiny", ["--target", "sm_12"], str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["d100"], "there is no shape d100: use d128-causal-16k"),
        (["tiny", "--target", "sm_12"], "invalid choice"),
        (["tiny", "--target", "sm_90", "--rounds", "0"], "it must be at least 1"),
        (["tiny", "--target", "sm_90", "--json", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_bad_options_name_a_remedy(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        first_call.main(argv)
    assert message in capsys.readouterr().err


def test_without_a_gpu_a_target_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(first_call.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        first_call.main(["tiny"])
    assert "--target sm_90 measures compiling only" in capsys.readouterr().err
