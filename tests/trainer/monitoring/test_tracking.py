"""Console line, metrics.jsonl, and wandb online, offline and without a network."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config.schema import Config
from ringspan.trainer.monitoring import tracking
from tests.trainer import jobs, wandb_server
from tests.trainer.checkpoint.test_resume import lines


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (8040, "2h14m"), (200_000, "2d07h")])
def test_durations(seconds: float, text: str) -> None:
    assert tracking.duration(seconds) == text


def test_console_line() -> None:
    values = dict(loss=3.4121, grad=0.83, lr=3e-4, tokens_per_s=131_000.0, tflops=412.3, mfu=0.416, gib=38.2, gib_share=0.27)
    expected = "step  120/1000  loss 3.412  grad 0.83  lr 3.0e-4  131k tok/s  412 TFLOP/s/GPU  "
    expected += "41.6% MFU (3.5×)  38.2 GiB (27%)  1m30s, ETA 2h14m"
    assert tracking.line(120, 1000, values, 90, 8040) == expected
    assert tracking.line(120, 1000, values | dict(source=dict(a=1.5, b=2)), 90, 8040) == expected + "  a 1.500  b 2.000"


def test_metrics_are_truncated_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    entries = [dict(kind=kind, step=step) for step in range(1, 6) for kind in ("train", "held_out")]
    text = "".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 6, "lo'
    for steps, kept in ((9, entries[:6]), (3, entries[:5])):  # 3 is the last step: its report will be written again
        path.write_text(text)
        tracking._truncate(path, 3, steps)
        assert [json.loads(entry) for entry in path.read_text().splitlines()] == kept


def test_metrics_wait_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tracker = tracking.Tracker(Config(), tmp_path, active=True)
    tracker.log(1, dict(loss=1.0))
    disk, tracker.file = tracker.file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    tracker.log(2, dict(loss=2.0))
    tracker.log(3, dict(loss=3.0))
    assert capsys.readouterr().out.count("metrics.jsonl: No space left on device; its lines wait") == 1
    tracker.file.close()
    tracker.file = disk
    tracker.close()
    assert [line["step"] for line in run_folder.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


class Broken:
    """wandb and TensorBoard whose `method` raises; the others count their calls."""

    def __init__(self, method: str, calls: list[str]) -> None:
        self.method, self.calls = method, calls

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            if name == self.method:
                raise ConnectionResetError("Connection lost\nand more")

        return call


@pytest.mark.parametrize(
    ("service", "method", "calls"),
    [
        ("wandb", "log", ["log"]),
        ("wandb", "finish", ["log"] * 4 + ["finish"]),
        ("TensorBoard", "add_scalar", ["add_scalar"]),
        ("TensorBoard", "close", ["add_scalar"] * 3 + ["close"]),
    ],
)
def test_a_failing_service_is_one_warning_and_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], service: str, method: str, calls: list[str]
) -> None:
    called: list[str] = []
    tracker = tracking.Tracker(Config(), tmp_path, active=True)
    setattr(tracker, {"wandb": "wandb", "TensorBoard": "board"}[service], Broken(method, called))
    tracker.log_table(1, "loss by position", ["a"], [1.0])
    for step in (1, 2):
        tracker.log(step, dict(loss=1.0, grad=2.0) if step == 1 else dict(loss=3.0))
    tracker.close()
    text = f"{service}: Connection lost; it is off, the run continues, and metrics.jsonl has every step\n"
    assert capsys.readouterr().err == text and called == calls
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_table_that_wandb_does_not_take_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, calls = pytest.importorskip("wandb"), list[str]()
    tracker = tracking.Tracker(Config(), tmp_path, active=True)
    tracker.wandb = Broken("", calls)
    monkeypatch.setattr(wandb, "Table", lambda **_: 1 / 0)
    tracker.log_table(1, "loss by position", ["a"], [1.0])
    assert calls == ["log"] and capsys.readouterr().err.startswith("wandb: division by zero; it is off, the run continues")


def validate_history(server: wandb_server.Server, metrics: list[dict[str, Any]], steps: int) -> None:
    """The wandb server has received the contents of metrics.jsonl."""
    assert len(metrics) == steps
    for line in metrics:
        assert server.history[line["step"]]["train/loss"] == pytest.approx(line["loss"], rel=1e-8)
    assert {"config.yaml", "wandb-summary.json"} <= server.files


def test_wandb_sync_uploads_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    options = [f"runs={tmp_path}", "name=run", "tracking=offline"]
    assert jobs.run_ranks(1, jobs.train, [*options, "steps=2"]) == [0]
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    run_id = file.stem.removeprefix("run-")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["run_id"] == run_id, "a resumed run keeps its id"
    assert jobs.run_ranks(1, jobs.train, [*options, "steps=3"]) == [0]
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert {file.name for folder in folders for file in folder.glob("*.wandb")} == {f"run-{run_id}.wandb"}
    with wandb_server.listening() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        sync = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, folders)]
        result = subprocess.run(sync, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and result.stderr.count("Finished syncing") == 2, result.stderr
    assert server.runs == {run_id} and server.configs[0]["data"]["value"]["length"] == 150
    validate_history(server, lines(tmp_path / "run"), steps=3)
    other = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002"
    assert jobs.run_ranks(1, jobs.train, [*options, "name=other", "steps=3", other]) == [0]
    (file,) = (tmp_path / "other" / "wandb").glob("offline-run-*/*.wandb")
    assert file.stem != f"run-{run_id}", "a run that starts from another run's checkpoint has its own id"


def online(folder: str, url: str) -> None:
    os.environ.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL=url)
    jobs.train([f"runs={folder}", "name=run", "steps=2", "tracking=wandb"])


def test_wandb_online_uploads_during_the_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with wandb_server.listening() as server:
        assert jobs.run_ranks(1, online, str(tmp_path), server.url) == [0]
    assert "continuing offline" not in jobs.output
    validate_history(server, lines(tmp_path / "run"), steps=2)


def without_network(folder: str) -> None:
    os.environ.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")  # the discard port
    jobs.train([f"runs={folder}", "name=run", "steps=1", "tracking=wandb", "tracking.init_timeout=5"])


def test_wandb_without_a_network_continues_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    start = time.monotonic()
    assert jobs.run_ranks(1, without_network, str(tmp_path)) == [0]
    assert time.monotonic() - start < 60, "including start-up; tracking.init_timeout limits the wait itself"
    assert jobs.output.count("continuing offline") == 1
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
