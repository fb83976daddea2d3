"""Progress lines of long steps."""

import time

from ringspan.trainer.monitoring.step_progress import StepProgress


def test_line_has_micro_batch_layer_and_estimate() -> None:
    begun = [100]
    progress = StepProgress(12, lambda: begun[0], print, is_active=False)
    assert progress.line(1.0) == ""
    progress.begin_micro_batch(1, 0, 8)
    begun[0] += 6
    assert progress.line(40) == "step 1: micro-batch 1 of 8, layer 6 of 12 forward; 40s, about 31m20s left in this step"
    begun[0] += 12
    assert "layer 6 of 12 backward; 40s, about 7m20s" in progress.line(40)  # two thirds of one of 8
    progress.begin_micro_batch(1, 4, 8)
    assert progress.line(60) == "step 1: micro-batch 5 of 8, layer 0 of 12 forward; 1m00s, about 1m00s left in this step"
    progress.end_step()
    assert progress.line(60) == ""


def test_a_long_step_prints_and_a_short_one_does_not() -> None:
    lines: list[str] = []
    progress = StepProgress(2, lambda: 0, lines.append, is_active=True, long_s=0.2)
    progress.begin_micro_batch(1, 0, 1)
    progress.end_step()
    time.sleep(0.4)
    assert lines == []
    progress.begin_micro_batch(2, 0, 1)
    deadline = time.monotonic() + 10
    while not lines and time.monotonic() < deadline:
        time.sleep(0.02)
    progress.close()
    assert lines and lines[0].startswith("step 2: micro-batch 1 of 1, layer 0 of 2 forward; 0s")
