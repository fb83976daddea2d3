"""The README's commands are ones that work: every config composes, every program starts, every link leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.trainer.config import compose

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/models-and-data.md", "docs/speed.md"]
RANKS = {"--nproc-per-node=4": 4}


def commands() -> list[list[str]]:
    """Lines of the blocks that name no language, and begin with a program that is started."""
    found = []
    for page in PAGES:
        language = None
        for line in (ROOT / page).read_text().splitlines():
            if line.startswith("```"):
                language = line[3:] if language is None else None
            elif language == "" and line.split(" ")[0] in ("make", "python", "torchrun", "sbatch"):
                found.append(shlex.split(line.partition("   ")[0], comments=True))  # what it does stands behind three spaces
    return found


def configs() -> list[list[str]]:
    """Of the commands that start a run."""
    starts = [words for words in commands() if {"launch", "trainer.train", "launch/slurm.sh"} & set(words)]
    return [
        [word for word in words if "=" in word and not word.startswith("--")] for words in starts if "--multirun" not in words
    ]


def test_there_are_commands() -> None:
    programs = {words[0] for words in commands()}
    assert {"make", "python", "torchrun", "sbatch"} <= programs and len(configs()) >= 5


@pytest.mark.parametrize("overrides", configs(), ids=" ".join)
def test_every_run_composes(overrides: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    missing = {"shards/*.bin", "~/books", "notes/*.md", "corpus.jsonl", "Qwen3-0.6B", "Llama-3.2-1B"}  # the reader's own files
    if any(name in word for name in missing for word in overrides):
        pytest.skip("needs files that only the reader has")
    assert compose.load(overrides, world_size=4).config.steps >= 1


@pytest.mark.parametrize("module", sorted({words[2] for words in commands() if words[:2] == ["python", "-m"]}))
def test_every_program_starts(module: str) -> None:
    for arguments in [["--help"], []] if module == "launch.doctor" else [["--help"]]:
        done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout, done.stderr


def test_make_train_runs_the_laptop_experiment() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "-m launch" in text and "experiment=laptop" in text
    assert (ROOT / "conf" / "experiment" / "laptop.yaml").exists()


def test_make_refuses_an_option_that_it_would_drop() -> None:
    for extra, wrong in (["steps=5"], True), (["ARGS=steps=5 seed=1", f"PYTHON={sys.executable}"], False):
        done = subprocess.run(["make", "-n", "train", *extra], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode != 0) == wrong and ("make does not know steps" in done.stderr) == wrong, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "nth, start", [(0, [sys.executable]), (1, [sys.executable, *["-m", "torch.distributed.run", "--nproc-per-node=4"]])]
)
def test_snippets_run(nth: int, start: list[str], tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[nth] + "print(out.shape)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, snippet], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "torch.Size" in done.stdout, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
