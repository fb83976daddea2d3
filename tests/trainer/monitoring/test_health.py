"""The watchdog, the console's words, signals and the safetensors format, each alone."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from ringspan.trainer.checkpoint import safetensors
from ringspan.trainer.monitoring import tracking
from ringspan.trainer.monitoring.stop_signals import StopSignals
from ringspan.trainer.monitoring.watchdog import Watchdog


def test_the_watchdog_names_the_rank_that_is_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = (Watchdog(tmp_path, rank, 3, seconds=0.6, beat=0.1) for rank in (0, 1))
    first.at(7, "reduction")
    second.at(6, "micro-batch 2 of 4")
    time.sleep(1.2)
    first.close()
    second.close()
    text = capfd.readouterr().err
    assert "rank 0 has waited" in text and "in step 7, reduction" in text
    assert "rank 1 is behind: step 6, micro-batch 2 of 4" in text
    assert "no sign of life from rank 2" in text


def test_a_watchdog_that_sees_progress_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dog = Watchdog(tmp_path, 0, 1, seconds=0.8, beat=0.1)
    for step in range(12):
        dog.at(step, "optimizer")
        time.sleep(0.1)
    dog.close()
    assert capfd.readouterr().err == ""


def test_a_signal_is_remembered_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals()
    assert not signals.stop
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.stop and signals.received == "SIGUSR1"
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (8040, "2h14m"), (200_000, "2d07h")])
def test_durations(seconds: float, text: str) -> None:
    assert tracking.duration(seconds) == text


def test_the_line() -> None:
    values = dict(loss=3.4121, grad=0.83, lr=3e-4, tokens_per_s=131_000.0, tflops=412.3, mfu=0.416, gib=38.2, gib_share=0.27)
    expected = "step  120/1000  loss 3.412  grad 0.83  lr 3.0e-4  131k tok/s  412 TFLOP/s/GPU  "
    expected += "41.6% MFU (3.5×)  38.2 GiB (27%)  ETA 2h14m"
    assert tracking.line(120, 1000, values, 8040) == expected
    assert tracking.line(120, 1000, values | dict(source=dict(a=1.5, b=2)), 8040) == expected + "  a 1.500  b 2.000"


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [dict(kind=kind, step=step) for step in range(1, 6) for kind in ("train", "held_out")]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo'
    for steps, kept in ((9, lines[:6]), (3, lines[:5])):  # the second time with its last report still to come
        path.write_text(text)
        tracking._cut(path, 3, steps)
        assert [json.loads(line) for line in path.read_text().splitlines()] == kept


def test_safetensors_come_back_and_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = dict(a=torch.randn(3, 5), b=torch.arange(7).to(torch.bfloat16), c=torch.tensor(3.0), d=torch.empty(0, 4))
    safetensors.write(path, tensors, dict(made="here"))
    file = safetensors.File(path)
    assert list(file) == list(tensors) and file.metadata == dict(made="here")
    for name, x in tensors.items():
        assert file[name].dtype == x.dtype and torch.equal(file[name], x) and file.shape(name) == tuple(x.shape)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is cut short"):
        safetensors.File(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="no safetensors file"):
        safetensors.File(path)
    writer = safetensors.Writer(path, dict(a=(torch.float32, (2,))), {})
    with pytest.raises(ValueError, match="announced"):
        writer.add(torch.zeros(3))
