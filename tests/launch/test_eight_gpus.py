"""The commands of `tests.launch.eight_gpus` name what exists. They themselves need eight GPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.parallel.bench import __main__ as ring
from ringspan.parallel.bench import rehearse
from ringspan.parallel.bench.baselines import candidates
from tests.launch import eight_gpus
from tests.trainer.memory.long_steps import PREDICTIONS


def options(name: str, hardware: str = "h200") -> list[str]:
    """The options after the last module of a command."""
    words = eight_gpus.command(name, hardware, Path("a folder"))
    return words[len(words) - words[::-1].index("-m") + 1 :]


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_a_step_is_predicted_to_end_in_time(hardware: str) -> None:
    action, name, *_ = options("step", hardware)
    predicted = json.loads(PREDICTIONS.read_text())[name]
    assert action == "run" and predicted["gpus"] == 8 and predicted["seconds"] < 0.6 * eight_gpus.LIMIT
    assert "experiment=qwen3_8b_1m" in predicted["options"] and any(
        x.startswith("debug.warm_up=") for x in predicted["options"]
    )


@pytest.mark.parametrize("name", ["ring", "ring-128k"])
def test_benchmarks_have_known_candidates(name: str) -> None:
    args = ring._parser(candidates()).parse_args(options(name))
    assert set(args.only.split(",")) <= set(candidates()) and args.json.parent.name == "a folder"


@pytest.mark.parametrize("name", ["rehearsal", "rehearsal-128k"])
def test_rehearsals_have_the_shapes_of_the_benchmarks(name: str) -> None:
    args = rehearse._parser().parse_args(options(name))
    measured = ring._parser(candidates()).parse_args(options(name.replace("rehearsal", "ring")))
    assert args.ranks == 8 and max(args.rank) < 8
    assert (args.tokens, args.heads) == (measured.tokens, measured.heads)


@pytest.mark.parametrize("name", ["tests", "tests-accuracy"])
def test_tests_of_eight_ranks_are_selected(name: str, tmp_path: Path) -> None:
    words = [*eight_gpus.command(name, "h200", tmp_path), "--collect-only", "-qq"]
    found = subprocess.run(words, cwd=eight_gpus.ROOT, capture_output=True, text=True, check=True).stdout
    ids = [line for line in found.splitlines() if "::" in line]
    assert 10 <= len(ids) <= 60 and all("8" in line.rpartition("[")[2] for line in ids)


def test_a_command_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(eight_gpus, "LIMIT", 0.5)
    monkeypatch.setattr(eight_gpus, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    assert eight_gpus.main(["step", "--out", str(tmp_path)]) == 1
    assert "step: ended after 0.5 s" in capsys.readouterr().err
