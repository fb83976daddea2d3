"""docs/examples: each program runs on a CPU in less than a minute, and prints what its text promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NUMBER = r"(\d\.\d+e[+-]\d+)"


def run(name: str, folder: Path, *launcher: str) -> str:
    """The output of an example that runs in another folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / name], env=environment, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_test_and_says_how_to_run_it() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["attention.py", "ring_in_your_model.py", "ring_two_ranks.py", "train_from_python.py"]
    for name in names:
        assert f"python docs/examples/{name}" in (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]


@pytest.mark.slow
def test_attention_equals_sdpa(tmp_path: Path) -> None:
    errors = re.findall(rf"output and gradients: {NUMBER}", run("attention.py", tmp_path))
    assert len(errors) == 6 and max(map(float, errors)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")], ids=["2", "3"]
)
def test_ring_equals_one_rank(launcher: tuple[str, ...], tmp_path: Path) -> None:
    output = run("ring_two_ranks.py", tmp_path, *launcher)
    assert f"zigzag, 1,003 tokens on {3 if launcher else 2} ranks" in output
    errors = dict(re.findall(rf"^(\w+) +largest difference from one rank: {NUMBER}", output, re.MULTILINE))
    assert list(errors) == ["out", "dq", "dk", "dv"] and max(map(float, errors.values())) < 1e-12


@pytest.mark.slow
def test_a_model_with_the_ring_equals_the_model_without(tmp_path: Path) -> None:
    output = run("ring_in_your_model.py", tmp_path)
    one, many = re.findall(r"ranks? (\d\.\d{12})", output)
    loss, gradients, largest = re.findall(rf"loss {NUMBER}, (\d+) gradients {NUMBER}", output)[0]
    assert abs(float(one) - float(many)) < 1e-11 and int(gradients) == 23
    assert float(loss) < 1e-12 and float(largest) < 1e-12


def test_the_ring_takes_few_lines_in_a_model() -> None:
    lines = (EXAMPLES / "ring_in_your_model.py").read_text(encoding="utf-8").splitlines()
    marked = [line for line in lines if line.endswith("  # ring")]
    assert 10 <= len(marked) < 15
    names = r"context_attention|Mesh|Mask|layout|mesh|all_reduce|dist\.(init|destroy)\w*"
    unmarked = [line for line in lines if re.search(rf"\b({names})\(", line) and line not in marked]
    assert unmarked == []  # every line that needs the ring or torch.distributed is marked


@pytest.mark.slow
def test_training_from_python(tmp_path: Path) -> None:
    output = run("train_from_python.py", tmp_path)
    first, last = re.findall(r"trained 10 steps: loss (\d+\.\d+) at the first, (\d+\.\d+) at the last", output)[0]
    assert float(last) < float(first) - 0.5
    assert list(tmp_path.iterdir()) == []  # everything was in a temporary folder
