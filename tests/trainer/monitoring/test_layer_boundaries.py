"""Layer boundaries: ranks agree on one, abandon the step there, and save the last completed step."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ringspan.parallel.coordination.progress import Stalled
from ringspan.trainer.monitoring import layer_boundaries
from ringspan.trainer.monitoring.layer_boundaries import LayerBoundaries, StepAbandoned
from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines

DETERMINISTIC = ["steps=4", "debug.deterministic=true"]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_boundaries, "PATIENCE_S", 0.05)
    monkeypatch.setattr(layer_boundaries, "POLL_S", 0.01)


def cross_until_abandoned(
    boundaries: LayerBoundaries, pace_s: float, stopped_at: list[int], barrier: threading.Barrier
) -> None:
    """Cross boundaries like a rank whose peers wait for it after every boundary."""
    try:
        for _ in range(10**6):
            boundaries.cross()
            time.sleep(pace_s)
            barrier.wait(10)
    except StepAbandoned:
        stopped_at.append(boundaries.crossed)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("paces", [(0.0, 0.0), (0.0, 0.02), (0.02, 0.0), (0.005, 0.004)])
def test_ranks_that_wait_for_each_other_stop_at_the_same_boundary(paces: tuple[float, float]) -> None:
    """A rank that waits at a boundary could keep its peer from the next one for ever."""
    store, stop, stopped_at, barrier = dist.HashStore(), [False], [], threading.Barrier(2)
    ranks = [LayerBoundaries(rank, 2, lambda rank=rank: stop[0] and rank == 1, store, 5.0) for rank in range(2)]
    for each in ranks:
        each._key = "run"
    threads = [
        threading.Thread(target=cross_until_abandoned, args=(each, pace, stopped_at, barrier), daemon=True)
        for each, pace in zip(ranks, paces, strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    stop[0] = True
    for thread in threads:
        thread.join(10)
    for each in ranks:
        each.close()
    assert len(stopped_at) == 2 and stopped_at[0] == stopped_at[1] > 1


@pytest.mark.usefixtures("fast")
def test_a_rank_that_does_not_answer_is_named() -> None:
    boundaries = LayerBoundaries(0, 3, lambda: True, dist.HashStore(), 0.3)
    boundaries.store.set(f"{boundaries._key}/1", "1")
    deadline = time.monotonic() + 5
    with pytest.raises(Stalled, match=r"rank 0 waited for rank 2, to abandon the step, in .*; the time limit is 0.3 s"):
        while time.monotonic() < deadline:
            boundaries.cross()
            time.sleep(0.01)
    boundaries.close()


def test_a_step_that_ends_soon_is_completed() -> None:
    boundaries = LayerBoundaries(0, 1, lambda: True, None, 5.0)
    for _ in range(10):
        boundaries.cross()  # raises StepAbandoned if the step is abandoned
        time.sleep(0.03)
    assert boundaries.crossed == 10
    boundaries.close()


def stop_in_step_3(run: Any, at: int) -> None:
    """Send SIGTERM to the last rank at a boundary of step 3, whose remaining boundaries take long."""
    layer_boundaries.PATIENCE_S, layer_boundaries.POLL_S = 0.05, 0.02
    boundaries = layer_boundaries._active
    assert boundaries is not None
    cross, first = boundaries.cross, []

    def slow_cross(begins_layer: bool = True) -> None:
        if run.position.step == 2:
            first.append(boundaries.crossed)
            if len(first) > at:
                if len(first) == at + 1 and run.distributed.rank == run.distributed.world - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
        cross(begins_layer)

    boundaries.cross = slow_cross  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Metrics of undisturbed runs by their options."""
    known: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def metrics(options: list[str]) -> list[dict[str, Any]]:
        if tuple(options) not in known:
            root = tmp_path_factory.mktemp("undisturbed")
            assert jobs.run_ranks(2, jobs.train, [*DETERMINISTIC, f"runs={root}", "name=run", *options]) == [0, 0]
            known[tuple(options)] = lines(root / "run")
        return known[tuple(options)]

    return metrics


STREAMED = "x/1 outs=1 heads=1"


# at: 0 is in the first forward of the step, 6 in its last backward
@pytest.mark.parametrize(
    ("zero", "plan", "at"),
    [
        (1, "none", 0), (1, STREAMED, 6), (3, "none", 0), (0, "none", 6), (2, STREAMED, 0),
        (3, STREAMED, 6), (1, "none", 6), (0, STREAMED, 0), (2, "none", 6), (3, "none", 6),
    ],
)  # fmt: skip
def test_a_long_step_is_abandoned_and_the_last_completed_one_saved(
    tmp_path: Path, undisturbed: Any, zero: int, plan: str, at: int
) -> None:
    """The same command then continues bit for bit."""
    options = [f"engine.zero={zero}", f"engine.memory={plan}"]
    run = [*DETERMINISTIC, f"runs={tmp_path}", "name=run", *options]
    began = time.monotonic()
    assert jobs.run_ranks(2, jobs.train, run, stop_in_step_3, at) == [0, 0]
    assert time.monotonic() - began < 60
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert jobs.run_ranks(2, jobs.train, run) == [0, 0]
    measured = [(line["loss"], line["grad"], line["samples"]) for line in lines(tmp_path / "run")]
    assert measured == [(line["loss"], line["grad"], line["samples"]) for line in undisturbed(options)]
