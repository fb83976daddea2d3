"""docs/examples: each program runs on a CPU in less than a minute, and prints what its text promises."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NUMBER = r"(\d\.\d+e[+-]\d+)"


def run(name: str, folder: Path, *launcher: str, arguments: list[str] | None = None, examples: Path = EXAMPLES) -> str:
    """The output of an example that runs in another folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(variable, None)
    command = [sys.executable, *launcher, examples / name, *(arguments or [])]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_test_and_says_how_to_run_it() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    hugging_face = ["fsdp2_ring.py", "hf_script.py", "hf_trainer_ring.py"]
    assert names == sorted(
        ["attention.py", "ring_in_your_model.py", "ring_two_ranks.py", "train_from_python.py", *hugging_face]
    )
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


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d+)", output)]  # lines of two ranks may join


@pytest.mark.slow
def test_transformers_trainer_on_a_ring(tmp_path: Path) -> None:
    one, two = (losses(run("hf_trainer_ring.py", tmp_path, arguments=a)) for a in (["--one-rank"], []))
    assert len(one) == 10 and two == pytest.approx(one, rel=1e-6) and one[-1] < one[0] - 0.1


@pytest.mark.slow
def test_fsdp2_on_a_ring(tmp_path: Path) -> None:
    one = run("fsdp2_ring.py", tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    two = run("fsdp2_ring.py", tmp_path)
    assert losses(two) == pytest.approx(losses(one), rel=2e-3) and losses(two)[-1] < losses(two)[0] - 1
    assert two.count(", 4 K/V blocks received") == len(losses(two)) == 8


@pytest.mark.slow
def test_the_patch_is_small_and_puts_the_script_onto_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "examples"
    folder.mkdir(parents=True)
    shutil.copy(EXAMPLES / "hf_script.py", folder)
    lines = (EXAMPLES / "hf_ring.patch").read_text(encoding="utf-8").splitlines()
    added, removed = ([line for line in lines if re.match(rf"{sign}(?!{sign})", line)] for sign in (r"\+", "-"))
    assert len((folder / "hf_script.py").read_text(encoding="utf-8").splitlines()) <= 65
    assert 0 < len(removed) <= len(added) <= 10
    subprocess.run(["git", "apply", EXAMPLES / "hf_ring.patch"], cwd=tmp_path, check=True)
    one = losses(run("hf_script.py", tmp_path))
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    two = losses(run("hf_script.py", tmp_path, *launcher, examples=folder))  # both ranks print
    assert len(one) == 12 and len(two) == 24
    assert sorted(two) == pytest.approx(sorted([*one, *one]), rel=1e-6)
