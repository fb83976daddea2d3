"""Supervisor: starts the ranks of a job on this host, forwards signals to them, and ends with the code of the first failure.

    socket          bound to 127.0.0.1 and inherited by rank 0, which serves torch's store on it
    pipe per rank   supervisor → rank: a line names the failed rank; the end of the pipe says that the supervisor has died
    report pipe     rank → supervisor: a line of JSON with the cause of a failure, in the order of the failures

The rank's side is ringspan/trainer/monitoring/supervised.py. The kernel closes the pipes of a supervisor that any signal ends,
so that no rank outlives it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringspan.trainer.monitoring import stop_signals, supervised

POLL_S = 0.05
ENDING_S = 10.0  # after a failure the other ranks end by themselves in about 4 s (supervised.py); then SIGKILL
RESUME_HINT = (
    "the same `ringspan launch` command resumes from the last checkpoint, if there is one (checkpoint=often saves more of them)"
)


class Outcome(NamedTuple):
    """How a job ended."""

    code: int
    stopped: bool  # a signal asked it to stop


class Supervisor:
    """The ranks of one job.

    Args:
        command: command of every rank.
        num_ranks: number of ranks.
        environment: environment of the ranks, to which the supervisor adds the rank and the address of the store.
    """

    def __init__(self, command: list[str], num_ranks: int, environment: Mapping[str, str]) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pipes: list[int] = []  # write ends, one per rank
        self.received: list[int] = []
        self.ended: set[int] = set()  # ranks that the supervisor killed, so that their deaths are no cause
        self.failure: tuple[int, str] | None = None  # exit code of the job and its message
        self._command, self._num_ranks, self._environment = command, num_ranks, environment
        self._reports: list[int] = []  # read end
        self._report_text = b""
        self._first_signal = 0.0
        self._later: list[tuple[int, str]] = []  # ranks and causes after the first failure

    def run(self) -> Outcome:
        """Start the ranks and wait for them. Signals that arrive after a requested stop has ended change nothing."""
        handled = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup sets SIG_IGN
            handled.append(signal.SIGHUP)
        original = {number: signal.signal(number, lambda number, frame: self.received.append(number)) for number in handled}
        try:
            self._start()
            self._wait()
        finally:
            self._kill()
            for handle in (*self.pipes, *self._reports):
                os.close(handle)
            for number, handler in original.items():
                signal.signal(number, signal.SIG_IGN if self.received else handler)
        code, message = self.failure or (0, "")
        later = [f"rank {rank} failed after that: {text}" for rank, text in self._later]
        if message:
            print(*later, message, sep="\n", file=sys.stderr, flush=True)
        return Outcome(code, bool(self.received))

    def _start(self) -> None:
        read_end, report_end = os.pipe()
        os.set_blocking(read_end, False)
        self._reports.append(read_end)
        with bind_store() as store:
            common = dict(self._environment) | dict(MASTER_ADDR=store.getsockname()[0], MASTER_PORT=str(store.getsockname()[1]))
            common |= dict(WORLD_SIZE=str(self._num_ranks), LOCAL_WORLD_SIZE=str(self._num_ranks))
            for rank in range(self._num_ranks):
                watched, write_end = os.pipe()
                self.pipes.append(write_end)
                inherited = [watched, report_end, *([store.fileno()] if rank == 0 else [])]
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), supervised.VARIABLE: ",".join(map(str, inherited))}
                # In a session of its own a rank gets no Ctrl-C from the terminal: the supervisor decides what it gets.
                self.ranks.append(
                    subprocess.Popen(self._command, env=common | variables, pass_fds=inherited, start_new_session=True)
                )
                os.close(watched)
        os.close(report_end)

    def _wait(self) -> None:
        num_forwarded, deadline = 0, float("inf")
        while running := [rank for rank, process in enumerate(self.ranks) if process.poll() is None]:
            for number in self.received[num_forwarded:]:
                num_forwarded += 1
                self._forward(number, running)
            if self.failure is None and self._find_failure():
                deadline = time.monotonic() + ENDING_S
                self._tell(running)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_S)
        self._find_failure()
        first = self.failure[1] if self.failure else ""
        self._later = [(rank, text) for rank, text in self._read_reports() if f"rank {rank} failed first: {text}" not in first]

    def _forward(self, number: int, running: list[int]) -> None:
        """Send a stop signal to the ranks. A second Ctrl-C, a second later at least, kills them: a person sends it."""
        now = time.monotonic()
        if not self._first_signal:
            print(stop_signals.announcement(number), file=sys.stderr, flush=True)
        self._first_signal = self._first_signal or now
        if number == signal.SIGINT and now - self._first_signal > 1:
            self.failure = self.failure or (128 + signal.SIGINT, "")
            self._kill()
        for rank in running:
            with contextlib.suppress(ProcessLookupError):  # the rank has just exited
                self.ranks[rank].send_signal(signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number)

    def _find_failure(self) -> bool:
        """Set `failure` to the cause that came first, if a rank has failed.

        A rank that a signal ended comes before ranks that report an error: they lost a peer.
        """
        codes = {rank: code for rank, process in enumerate(self.ranks) if (code := process.returncode)}
        if self.failure is not None or not codes:
            return False
        killed = [rank for rank, code in codes.items() if code < 0 and rank not in self.ended]
        reports = self._read_reports()
        rank = killed[0] if killed else next((r for r, _ in reports if r in codes), min(codes))
        code = codes[rank]
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (if no user sent it, the machine was out of memory)" if code == -signal.SIGKILL else ""
            self.failure = 128 - code, f"rank {rank} was ended by {name}{hint}; {RESUME_HINT}"
        elif text := next((text for r, text in reports if r == rank), ""):
            self.failure = code, f"rank {rank} failed first: {text}; {RESUME_HINT}"
        else:  # the rank or rank 0 has printed its message
            self.failure = code, ""
        return True

    def _read_reports(self) -> list[tuple[int, str]]:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reports[0], 65536):
                self._report_text += data
        lines: list[Any] = []
        for line in self._report_text.splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return [(line["rank"], line["cause"]) for line in lines]

    def _tell(self, running: list[int]) -> None:
        """Name the failed rank to the others, which then end."""
        assert self.failure is not None
        cause = self.failure[1].removesuffix(f"; {RESUME_HINT}")
        for rank in running:
            with contextlib.suppress(OSError):  # the rank has just exited
                os.write(self.pipes[rank], f"{cause}\n".encode())

    def _kill(self) -> None:
        for rank, process in enumerate(self.ranks):
            if process.poll() is None:
                self.ended.add(rank)
                process.kill()
                process.wait()


def bind_store() -> socket.socket:
    """Return a socket of the loopback interface for torch's store, which listens on it."""
    store = socket.socket()
    store.bind(("127.0.0.1", 0))
    return store
