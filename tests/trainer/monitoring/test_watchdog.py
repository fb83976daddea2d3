"""The watchdog names late and silent ranks, and prints nothing while there is progress."""

import time
from pathlib import Path

import pytest

from ringspan.trainer.monitoring.watchdog import Watchdog


def test_watchdog_names_the_late_and_the_silent_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = (Watchdog(tmp_path, rank, 3, seconds=0.6, beat=0.1) for rank in (0, 1))
    first.update(7, "reduction")
    second.update(6, "micro-batch 2 of 4")
    time.sleep(1.2)
    first.close()
    second.close()
    text = capfd.readouterr().err
    assert "rank 0 has waited" in text and "in step 7, reduction" in text
    assert "rank 1 is behind: step 6, micro-batch 2 of 4" in text
    assert "no sign of life from rank 2" in text


def test_watchdog_is_silent_while_there_is_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = Watchdog(tmp_path, 0, 1, seconds=0.8, beat=0.1)
    for step in range(12):
        watchdog.update(step, "optimizer")
        time.sleep(0.1)
    watchdog.close()
    assert capfd.readouterr().err == ""
