"""The command `ringspan check`: its report, exit codes and start-up."""

import subprocess
import sys

import pytest

from ringspan import ROOT
from ringspan.trainer import check
from tests.trainer.planning.configs import BIG


def test_plan_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(BIG) == 0
    out = capsys.readouterr().out
    assert "8,030,261,248 weights" in out and "it fits" in out and "longest sequence that fits" in out
    assert "data 1 × ring 4 × ulysses 1" in out and "attention counted 3.5×" in out
    assert "chosen  x/1 outs=32 " in out and out.count("\n  next    x/") == 2
    assert "fewest GPUs for 262,144 tokens: 2 × NVIDIA H200 in one ring" in out
    assert check.main([*BIG, "engine.zero=1", "hardware.memory_gib=60"]) == 1
    out = capsys.readouterr().out
    assert "IT DOES NOT FIT" in out and "changes that fit" in out
    remedy = next(line for line in out.splitlines() if line.strip().startswith("engine.zero=3"))
    changes = remedy.strip().partition(":")[0].split()
    assert check.main([*BIG, "hardware.memory_gib=60", *changes]) == 0
    assert check.main([*BIG, "hardware.memory_gib=79", "engine.memory=x/1 outs=32"]) == 1
    remedies = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  engine.")]
    assert len(remedies) == len(set(remedies)) > 0


def test_plan_for_this_machine_measures_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["hardware=cpu", "data.length=512"]) == 0
    out = capsys.readouterr().out
    assert "2 × CPU rank" in out and "measured on this machine" in out and "nan" not in out


def test_ranks_with_less_than_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["experiment=laptop", "hardware=h200", "hardware.gpus=1024"]) == 0
    assert "ring 1024" in capsys.readouterr().out


def test_plan_reads_no_file_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A laptop plans a run whose files are on a cluster."""
    assert check.main(["experiment=qwen3_continue", "hardware=h200", "init_from=/cluster/Qwen3", "data=text"]) == 0
    assert capsys.readouterr().out.startswith("qwen3-0.6b: 596,049,920 weights")
    with pytest.raises(SystemExit) as stop:
        check.main(["experiment=qwen3_continue", "hardware=h200", "model.vocabulary=0"])
    assert stop.value.code == 2 and "tokenizer.path=''" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware.gpus=3", "parallel.ring=2"], "parallel"),
        (["model.heads=7"], "model.heads=7"),
        (["hardware=h2000"], "h2000"),
        (["model.vocabulary=100"], "model.vocabulary=100"),
    ],
)
def test_invalid_config_exits_with_code_2(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        check.main([*BIG, *overrides])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_for_a_known_machine_imports_no_torch() -> None:
    code = "import sys; from ringspan.trainer import check; check.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "experiment=llama_8b_1m", "hardware=h200", "hardware.gpus=4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama-8b: 8,030,261,248 weights")
