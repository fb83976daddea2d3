"""Run folders from elsewhere: links, special files, YAML aliases, interpolations and damaged records."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import compose
from ringspan.trainer.reports import results
from tests.trainer.checkpoint.test_kill_points import SMALL


@pytest.fixture
def composed(tmp_path: Path) -> compose.Composed:
    return compose.load([*SMALL, f"runs={tmp_path}", "name=run", "steps=4"])


@pytest.fixture
def run(tmp_path: Path, composed: compose.Composed) -> Path:
    """The folder of a run that was recorded, with its lock released."""
    folder, lock = run_folder.enter(composed)
    run_folder.record(folder, composed, 2, "CPU rank", 0, "none")
    lock.close()
    assert run_folder.config_of(folder).steps == 4
    return folder


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hush")


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "YAML aliases, and more"),
        ("name: ${oc.env:SECRET}", r"name has an interpolation, \${…}, which is not resolved"),
        ("data: {sources: {a: {paths: ['${oc.env:SECRET}']}}}", "data.sources.a.paths has an interpolation"),
        ("a: " + "[" * 10_000, "not a config of this version"),
        ("- 1", "it has no options"),
        ("steps: many", "not a config of this version"),
        ("!!python/object/apply:os.system [true]", "not a config of this version"),
        ("x" * (2**20 + 1), "at most"),
    ],
)
def test_a_foreign_config_is_one_error(
    run: Path, composed: compose.Composed, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        run_folder.config_of(run)
    assert str(run / "config.yaml") in str(error.value) and "hush" not in str(error.value)
    (run / "metrics.jsonl").write_text(json.dumps(dict(kind="train", step=1, loss=2.0, time=1e12)) + "\n")
    with pytest.raises(SystemExit) as stop:
        results.main([str(run), "--json", str(run / "out.json")])
    assert stop.value.code == 2 and "hush" not in capsys.readouterr().err and not (run / "out.json").exists()
    run_folder.enter(composed)[1].close()  # the run itself goes on, and writes its config again


def test_a_special_file_as_config_is_one_error(run: Path, composed: compose.Composed) -> None:
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    with pytest.raises(compose.ConfigError, match="not a regular file"):
        run_folder.enter(composed)


def test_a_planted_link_in_place_of_the_lock_is_refused(run: Path, composed: compose.Composed) -> None:
    precious = run.parent / "precious"
    precious.write_text("content")
    (run / "lock").unlink()
    (run / "lock").symlink_to(precious)
    with pytest.raises(compose.ConfigError, match="is a symbolic link"):
        run_folder.enter(composed)
    assert precious.read_text() == "content"


@pytest.mark.parametrize(
    "name", ["config.yaml.part", "config.yaml", "changes.patch", "starts.jsonl", "finished.json.part", "finished.json"]
)
def test_planted_links_are_replaced(run: Path, composed: compose.Composed, name: str) -> None:
    precious = run.parent / "precious"
    precious.write_text("content")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious)
    run_folder.enter(composed)[1].close()
    run_folder.record(run, composed, 2, "CPU rank", 0, "none")
    run_folder.finish(run, dict(steps=4))
    assert precious.read_text() == "content" and run_folder.config_of(run).steps == 4 and run_folder.is_finished(run)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("[1]"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text('{"steps": "4"}'),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_text("[" * 100_000),
        os.mkfifo,
        Path.mkdir,
    ],
)
def test_a_damaged_finished_json_is_set_aside(
    run: Path, composed: compose.Composed, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / "finished.json")
    assert not run_folder.is_finished(run)
    run_folder.enter(composed)[1].close()
    assert "is damaged, so the run counts as not finished; it is renamed to finished.json.bad" in capsys.readouterr().out
    assert not (run / "finished.json").exists() and os.path.lexists(run / "finished.json.bad")


def test_reports_are_strict_json(run: Path) -> None:
    run_folder.finish(run, dict(steps=4, held_out=dict(loss=float("nan"))))
    assert json.loads((run / "finished.json").read_text()) == dict(steps=4, held_out=dict(loss=None))
