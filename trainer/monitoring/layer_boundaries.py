"""Layer boundaries: points of a step at which all ranks can abandon it together, so that a stop does not wait for a long step.

The model crosses a boundary before each layer's attention, in forward and backward. All ranks cross the same boundaries in the
same order, so a boundary has a number. A stop request that is older than `PATIENCE_S` is published in the job's store:

    thread of each rank    sees the request; publishes its limit, the number of the next boundary; reads all limits
    main thread            waits at its limit until the largest limit is known; raises StepAbandoned at that boundary

No rank has passed the largest limit, and no collective before it waits for an operation after it, so every rank gets there.
A thread reads the store a few times a second; a boundary itself costs a comparison. On a GPU the host may be seconds ahead of
the device, so it waits for the boundary that it crossed RUN_AHEAD_S ago.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ringspan.parallel.coordination.arrivals import rank_names
from ringspan.parallel.coordination.progress import Stalled, describe

PATIENCE_S = 3.0  # a step that ends within it is completed
POLL_S = 0.25
RUN_AHEAD_S = 2.0
_numbers = itertools.count()  # of the runs of a process, which share the store; equal on all ranks


class StepAbandoned(Exception):
    """All ranks abandon the step at the same layer boundary. Weights and optimizer are those of the last completed step."""


class LayerBoundaries:
    """Counts boundaries and agrees on one with the other ranks, from construction to `close`.

    Args:
        rank: this rank.
        world: number of ranks.
        is_stopping: whether this rank has got a stop signal.
        store: this object's own connection to the job's store; None with one rank.
        timeout_s: limit of the wait for the other ranks.
    """

    def __init__(self, rank: int, world: int, is_stopping: Callable[[], bool], store: Any, timeout_s: float) -> None:
        self.rank, self.world, self.is_stopping, self.store, self.timeout_s = rank, world, is_stopping, store, timeout_s
        self._key = f"ringspan/abandon/{next(_numbers)}"
        self.crossed = 0
        self.layers = 0  # of them, those that begin a layer
        self.limit: int | None = None  # this rank stays before the boundary of this number until `last` is known
        self.last: int | None = None  # all ranks abandon the step at this boundary
        self._lock = threading.Lock()
        self._agreed = threading.Event()
        self._closed = threading.Event()
        self._events: deque[tuple[float, torch.cuda.Event]] = deque()
        self._thread = threading.Thread(target=self._watch, name="layer-boundaries", daemon=True)
        self._thread.start()

    def cross(self, begins_layer: bool = True) -> None:
        """Cross the next boundary.

        Args:
            begins_layer: whether it is the first one of a layer in this direction.

        Raises:
            StepAbandoned: on all ranks at the same boundary.
            Stalled: the other ranks did not answer.
        """
        with self._lock:
            self.crossed += 1
            self.layers += begins_layer
            limit = self.limit
        if limit is None or self.crossed < limit:
            return
        if not self._agreed.wait(self.timeout_s):
            missing = [rank for rank in range(self.world) if not self._is_published(rank)]
            raise Stalled(
                f"rank {self.rank} waited for {rank_names(missing or [self.rank])}, to abandon the step, in {describe()}; "
                f"the time limit is {self.timeout_s:g} s"
            )
        assert self.last is not None
        if self.crossed >= self.last:
            raise StepAbandoned

    def limit_run_ahead(self) -> None:
        """Wait for the device if the host is more than RUN_AHEAD_S ahead of it."""
        now = time.monotonic()
        while self._events and self._events[0][1].query():
            self._events.popleft()
        while self._events and now - self._events[0][0] > RUN_AHEAD_S:
            self._events.popleft()[1].synchronize()
        event = torch.cuda.Event()
        event.record()
        self._events.append((now, event))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=4 * POLL_S)

    def _watch(self) -> None:
        since = None
        while not self._closed.wait(POLL_S):
            if self.is_stopping():
                since = since or time.monotonic()
            try:
                if self.limit is None:
                    if since is not None and time.monotonic() - since > PATIENCE_S:
                        self._request()
                    elif self.store is None or not self.store.check([self._key]):
                        continue
                    self._publish()
                if all(self._is_published(rank) for rank in range(self.world)):
                    self.last = max(self._limit_of(rank) for rank in range(self.world))
                    self._agreed.set()
                    return
            except RuntimeError:  # the store is gone, so the job ends
                return

    def _request(self) -> None:
        if self.store is not None:
            self.store.set(self._key, "1")

    def _publish(self) -> None:
        with self._lock:
            self.limit = self.crossed + 1
        if self.store is not None:
            self.store.set(f"{self._key}/{self.rank}", str(self.limit))

    def _is_published(self, rank: int) -> bool:
        return self.store.check([f"{self._key}/{rank}"]) if self.store is not None else self.limit is not None

    def _limit_of(self, rank: int) -> int:
        return int(self.store.get(f"{self._key}/{rank}")) if self.store is not None else self.limit or 0


_active: LayerBoundaries | None = None


def activate(boundaries: LayerBoundaries | None) -> None:
    """Set the boundaries of this process's run; None: the run has ended."""
    global _active
    if _active is not None:
        _active.close()
    _active = boundaries


def cross_layer_boundary(device: torch.device, begins_layer: bool = True) -> None:
    """Cross a boundary of the run, if there is one. The model calls it, also in the backward's thread.

    Args:
        device: the device of the layer.
        begins_layer: see `LayerBoundaries.cross`.
    """
    if _active is not None:
        _active.cross(begins_layer)
        if device.type == "cuda":
            _active.limit_run_ahead()
