"""Watchdog: names the rank that stopped when a run makes no progress.

Each rank publishes its progress, (step, phase) of the loop and (layer, operator) of the ring, as a file in the run's folder. A
thread rewrites the file every few seconds. It runs while the main thread hangs in a collective and needs no network. When a
rank's own step has not changed for `seconds`, the rank reads all files and names the rank with the lowest step. On a folder
that the ranks do not share it can only report its own progress. The timeouts of the process groups then end the run.
"""

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from ringspan.parallel.coordination import progress


class Watchdog:
    """Publishes this rank's progress and reports a stall.

    Args:
        folder: the run's folder.
        rank: this rank.
        world: number of ranks.
        seconds: time without progress before the report; 0 disables the watchdog.
        beat: seconds between two writes of the file.
    """

    def __init__(self, folder: Path, rank: int, world: int, seconds: float, beat: float = 5.0) -> None:
        self.folder, self.rank, self.world, self.seconds = folder / "ranks", rank, world, seconds
        self.beat = min(beat, seconds / 4) if seconds else beat
        self.step, self.phase, self.last_progress = 0, "start", time.monotonic()
        self.warned = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if seconds:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def update(self, step: int, phase: str) -> None:
        """Record progress of the loop."""
        self.step, self.phase, self.last_progress, self.warned = step, phase, time.monotonic(), False
        progress.update(step=step)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self.beat)

    def _run(self) -> None:
        while not self._stop.wait(self.beat):
            self._publish()
            if time.monotonic() - self.last_progress > self.seconds and not self.warned:
                self.warned = True
                print(self.report(), file=sys.stderr, flush=True)

    def _publish(self) -> None:
        state = dict(step=self.step, phase=self.phase, where=progress.describe())
        state |= dict(idle=time.monotonic() - self.last_progress, time=time.time())
        path = self.folder / f"{self.rank}.json"
        try:
            part = path.with_suffix(".part")
            part.unlink(missing_ok=True)  # a planted link would be written through
            with part.open("x") as file:
                file.write(json.dumps(state))
            os.replace(part, path)
        except OSError:
            pass  # a full disk must not end a run that could continue

    def report(self) -> str:
        """Return a report of all ranks' progress, which names the rank that is behind."""
        self._publish()
        states = {}
        for rank in range(self.world):
            try:
                states[rank] = json.loads((self.folder / f"{rank}.json").read_text())
            except (OSError, ValueError):
                continue
        oldest = time.time() - (4 * self.beat + 1)
        silent = [rank for rank in range(self.world) if rank not in states or states[rank]["time"] < oldest]
        waited = time.monotonic() - self.last_progress
        lines = [f"ringspan: rank {self.rank} has waited {waited:.0f} s in step {self.step}, {self.phase}"]
        if silent:
            lines.append(f"  no sign of life from rank {', '.join(map(str, silent))}: look at the end of that process's output")
        alive = {rank: state for rank, state in states.items() if rank not in silent}
        if alive:
            behind = min(alive, key=lambda rank: (alive[rank]["step"], -alive[rank]["idle"]))
            steps = {state["step"] for state in alive.values()}
            if len(steps) > 1:
                state = alive[behind]
                lines.append(f"  rank {behind} is behind: step {state['step']}, {state['phase']}, {state['where']}")
            else:
                lines += [f"  rank {rank}: {state['phase']}, {state['where']}" for rank, state in sorted(alive.items())]
        lines.append("  this rank's main thread:")
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines += ["    " + line.strip().replace("\n", "  ") for line in traceback.format_stack(frame)[-3:]] if frame else []
        return "\n".join(lines)
