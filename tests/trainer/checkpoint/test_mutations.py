"""Random damage against every reader of a run: checksummed files are refused or recovered, others are valid or one message."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.launch import sweep
from ringspan.trainer import export
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.checkpoint.load_model import RestoredModel
from ringspan.trainer.checkpoint.reader import Reader
from ringspan.trainer.checkpoint.start import StartFinder
from ringspan.trainer.config import compose
from ringspan.trainer.data import tokenizer
from ringspan.trainer.monitoring import tracking
from ringspan.trainer.reports import results
from tests.trainer import faults, jobs
from tests.trainer.checkpoint.test_checkpoint import newest
from tests.trainer.checkpoint.test_kill_points import SMALL
from tests.trainer.checkpoint.test_resume import lines, weights

MESSAGES = (ValueError, OSError)  # programs print these as one message


@pytest.fixture(scope="module")
def seed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with two checkpoints, and its weights in Hugging Face's format."""
    runs = tmp_path_factory.mktemp("runs")
    assert jobs.run_ranks(1, jobs.train_plain, [*SMALL, f"runs={runs}", "name=seed", "steps=3"]) == [0]
    export.main([f"checkpoint={runs}/seed", f"to={runs}/hf"])
    return runs / "seed"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise an error after `seconds`."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"a reader took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Readers:
    """Readers by the files that they read. Each gets the run's folder and returns, or raises one of MESSAGES."""

    def __init__(self, run: Path) -> None:
        self.run, self.hf = run, run.parent / "hf"
        self.last = run / "checkpoints/step-00000003"
        self.saved = weights(self.last), Reader(self.last).position
        self.config = tokenizer.resolve_config(run_folder.config_of(run))
        self.config.init_from = str(self.hf)
        reader = Reader(self.last)
        self.shapes = {name: torch.Size(reader.file_of[name].shape(name)) for name in reader.names}

    def files(self) -> list[tuple[Path, list[Callable[[], Any]]]]:
        found: list[tuple[Path, list[Callable[[], Any]]]] = []
        for path in sorted(self.last.iterdir()):
            found.append((path, [self.checksummed]))
            if path.name != "manifest.json":
                found.append((path, [self.sealed, self.restored]))
        for name in ("config.yaml", "starts.jsonl", "metrics.jsonl", "finished.json"):
            found.append((self.run / name, [self.records]))
        return [*found, *((path, [self.published]) for path in sorted(self.hf.iterdir()))]

    def checksummed(self) -> None:
        name, damaged = newest(self.run / "checkpoints")
        if name == self.last.name:
            assert damaged == [] and (weights(self.last), Reader(self.last).position) == self.saved
        else:
            assert name == "step-00000002" and len(damaged) == 1 and f"{self.last.name} is damaged: " in damaged[0]

    def sealed(self) -> None:
        """Forged content with the right hashes."""
        faults.seal(self.last)
        name, damaged = newest(self.run / "checkpoints")
        assert (name == self.last.name) == (not damaged) and name is not None
        if name == self.last.name:
            reader = Reader(self.last)
            reader.validate({key: reader.file_of[key].shape(key) for key in reader.names}, "adamw")
            for key in reader.names:
                for kind in ("weight", "exp_avg"):
                    reader.values(key, kind, 0, 3)

    def restored(self) -> None:
        faults.seal(self.last)
        RestoredModel(str(self.last)).build(torch.device("cpu"), torch.float32)

    def records(self) -> None:
        copy = self.run.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in ("config.yaml", "starts.jsonl", "metrics.jsonl", "finished.json"):
            shutil.copy(self.run / name, copy)
        sweep.outcome(copy)
        run_folder.finished_steps(copy)
        with (
            contextlib.suppress(SystemExit),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            results.main([str(copy), "--skip", "0", "--json", str(copy / "out.json")])
        composed = compose.Composed(self.config, [], "steps: 3\n")
        tracking._truncate(copy / "metrics.jsonl", 2, 3)
        lines(copy)
        run_folder._validate_options(copy, self.config)
        run_folder.record(copy, composed, 1, "CPU rank", 2, "none")
        [json.loads(line)["ranks"] if "ranks" in line else 0 for line in (copy / "starts.jsonl").read_text().splitlines()]
        run_folder.config_of(self.run)

    def published(self) -> None:
        composed = compose.Composed(self.config, [], "")
        rank: Any = faults.SingleRank()
        finder = StartFinder(composed, self.run.parent / "new", self.config.model, self.shapes, {}, rank)
        assert len(finder.find().values("norm.weight", "weight", 0, 3)) == 3


@pytest.mark.parametrize("numbers", [range(100), pytest.param(range(10_000), marks=pytest.mark.faults)], ids=len)
def test_damaged_files_are_refused_or_valid(
    seed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], numbers: range
) -> None:
    """Each number is the seed of its damage, so that one can be repeated alone."""
    monkeypatch.setenv("SECRET", "hush")
    monkeypatch.setattr(run_folder, "git_state", lambda folder: {})
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    readers = Readers(Path(shutil.copytree(seed_run.parent, tmp_path / "runs")) / "seed")
    targets = readers.files()
    manifest = (readers.last / "manifest.json").read_bytes()
    refused = 0
    for number in numbers:
        path, calls = targets[number % len(targets)]
        original = path.read_bytes()
        damaged = faults.mutate(original, random.Random(number))
        path.write_bytes(damaged)
        for call in calls:
            try:
                with limited(60):
                    call()
            except MESSAGES as error:
                assert str(error) and "hush" not in str(error)
                refused += 1
            except BaseException as error:
                raise AssertionError(f"number {number}, {path.name}, {call.__name__}: {damaged[:300]!r}") from error
        path.write_bytes(original)
        (readers.last / "manifest.json").write_bytes(manifest)
    assert "hush" not in capsys.readouterr().out
    assert 0.1 < refused / len(numbers) < 0.9


def train_command(options: list[str]) -> None:
    """Run a rank as `ringspan train` does, with its messages and exit code."""
    from ringspan.trainer import train

    raise SystemExit(train.run(compose.load(options)))


SAMPLE = [pytest.param(4, marks=pytest.mark.exhaustive), pytest.param(150, marks=pytest.mark.faults)]


@pytest.mark.parametrize("count", SAMPLE)
def test_runs_with_a_damaged_file_go_on_or_end_with_one_message(seed_run: Path, tmp_path: Path, count: int) -> None:
    options = [*SMALL, f"runs={tmp_path}", "steps=4", "tracking.log_every=1"]
    shutil.copytree(seed_run, tmp_path / "whole")
    assert jobs.run_ranks(1, train_command, [*options, "name=whole"]) == [0]
    expected = {line["step"]: line["loss"] for line in lines(tmp_path / "whole")}
    for number in range(count):
        choose = random.Random(number)
        run = Path(shutil.copytree(seed_run, tmp_path / f"run-{number}"))
        path = choose.choice([path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "lock"])
        path.write_bytes(faults.mutate(path.read_bytes(), choose))
        (code,) = jobs.run_ranks(1, train_command, [*options, f"name={run.name}"], limit=60)
        assert "Traceback" not in jobs.output, path
        assert code in (0, 2, 3), (code, path)
        if code == 0:
            assert lines(run)[-1]["step"] == 4 and lines(run)[-1]["loss"] == expected[4], path
        else:
            assert jobs.output.count("ringspan train: ") == 1, path
        shutil.rmtree(run)
