"""Says which rank is behind when nothing moves.

Every rank publishes where it is: (step, phase) from the loop, layer and op from the ring, in a file of the run's folder that a
thread rewrites every few seconds, so it works while the main thread hangs in a collective and needs no network of its own.
When a rank's own step has not moved for `seconds`, it reads all the files and names the rank with the lowest step; on a
folder that ranks do not share it can only say where itself is. Then it leaves the ending to the time limits of the groups.
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
    def __init__(self, folder: Path, rank: int, world: int, seconds: float, beat: float = 5.0) -> None:
        self.folder, self.rank, self.world, self.seconds = folder / "ranks", rank, world, seconds
        self.beat = min(beat, seconds / 4) if seconds else beat
        self.step, self.phase, self.moved = 0, "start", time.monotonic()
        self.warned = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if seconds:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def at(self, step: int, phase: str) -> None:
        """The loop's news: any change counts as progress."""
        self.step, self.phase, self.moved, self.warned = step, phase, time.monotonic(), False
        progress.at(step=step)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self.beat)

    def _run(self) -> None:
        while not self._stop.wait(self.beat):
            self._publish()
            if time.monotonic() - self.moved > self.seconds and not self.warned:
                self.warned = True
                print(self.report(), file=sys.stderr, flush=True)

    def _publish(self) -> None:
        here = dict(
            step=self.step, phase=self.phase, where=progress.here(), idle=time.monotonic() - self.moved, time=time.time()
        )
        path = self.folder / f"{self.rank}.json"
        try:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(here))
            os.replace(part, path)
        except OSError:
            pass  # a full disk must not end a run that could go on

    def report(self) -> str:
        self._publish()
        found = {}
        for rank in range(self.world):
            try:
                found[rank] = json.loads((self.folder / f"{rank}.json").read_text())
            except (OSError, ValueError):
                continue
        silent = [
            rank for rank in range(self.world) if rank not in found or time.time() - found[rank]["time"] > 4 * self.beat + 1
        ]
        lines = [
            f"ringspan: rank {self.rank} has waited {time.monotonic() - self.moved:.0f} s in step {self.step}, {self.phase}"
        ]
        if silent:
            lines.append(f"  no sign of life from rank {', '.join(map(str, silent))}: look at the end of that process's output")
        alive = {rank: here for rank, here in found.items() if rank not in silent}
        if alive:
            behind = min(alive, key=lambda rank: (alive[rank]["step"], -alive[rank]["idle"]))
            steps = {here["step"] for here in alive.values()}
            if len(steps) > 1:
                here = alive[behind]
                lines.append(f"  rank {behind} is behind: step {here['step']}, {here['phase']}, {here['where']}")
            else:
                lines += [f"  rank {rank}: {here['phase']}, {here['where']}" for rank, here in sorted(alive.items())]
        lines.append("  this rank's main thread:")
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines += ["    " + line.strip().replace("\n", "  ") for line in traceback.format_stack(frame)[-3:]] if frame else []
        return "\n".join(lines)
