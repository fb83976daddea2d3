"""A rank's side of the pipes to its supervisor (ringspan/launch/supervisor.py). Imports no torch, so that it starts first.

A thread waits on the pipe. Its end says that the supervisor has died: the rank exits at once, because a save that is cut off
damages no checkpoint. A line on it names a rank that failed: the rank then gets a few seconds to raise its own error, prints
where it was, and exits. Under torchrun, which has no such pipe, the kernel kills the rank when its parent dies.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time

VARIABLE = "RINGSPAN_SUPERVISOR"  # file descriptors: the pipe to wait on, the report pipe, on rank 0 the store's socket
PR_SET_PDEATHSIG = 1
OWN_ERROR_S = 3.0  # gloo raises within a second of a peer's death; NCCL would wait for its timeout
MAX_CAUSE = 1500  # bytes: the line of JSON stays below 4096, up to which a write to a pipe is atomic

_report_pipe = -1
_store_socket = -1


def watch() -> None:
    """Start to wait on the supervisor's pipe. Does nothing in a process that no supervisor started."""
    global _report_pipe, _store_socket
    text = os.environ.pop(VARIABLE, "")  # children of this rank have no use for it
    if not text:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(OSError, AttributeError):  # not Linux
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        return
    watched, _report_pipe, *rest = map(int, text.split(","))
    _store_socket = rest[0] if rest else -1
    for handle in (watched, _report_pipe, *rest):
        os.set_inheritable(handle, False)
    threading.Thread(target=_wait, args=(watched,), name="supervisor", daemon=True).start()


def take_store_socket() -> int:
    """Return the file descriptor of the socket that torch's store listens on, once; −1 if there is none."""
    global _store_socket
    handle, _store_socket = _store_socket, -1
    return handle


def is_supervised() -> bool:
    """Return whether a supervisor started this process and prints its messages about signals and failures."""
    return _report_pipe >= 0


def report(cause: str) -> bool:
    """Report why this rank fails, before it exits; return whether there is a supervisor, which prints the first cause."""
    if is_supervised():
        cause = " ".join(cause.split()).encode(errors="replace")[:MAX_CAUSE].decode(errors="ignore")
        line = json.dumps(dict(rank=int(os.environ.get("RANK", 0)), cause=cause), ensure_ascii=False)
        with contextlib.suppress(OSError):  # the supervisor has died
            os.write(_report_pipe, line.encode() + b"\n")
            return True
    return False


def _wait(watched: int) -> None:
    rank, line = os.environ.get("RANK", "0"), os.read(watched, 4096)
    message = f"rank {rank} ends, because its launcher has ended"
    if line:
        time.sleep(OWN_ERROR_S)
        cause = line.decode(errors="replace").strip()
        message = f"{cause}; rank {rank} ends in {where()}" if cause else ""
    with contextlib.suppress(Exception):
        os.write(2, f"ringspan: {message}\n".encode() if message else b"")
    os._exit(1)


def where() -> str:
    """Return this rank's step and operator, if the training has started."""
    progress = sys.modules.get("ringspan.parallel.coordination.progress")
    return str(progress.describe()) if progress is not None else "its start"
