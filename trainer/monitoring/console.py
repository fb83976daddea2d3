"""Console: stdout and stderr that never end a run, whatever happens to the terminal, pipe or file that they write to.

A failed write (full disk, closed pipe or terminal) is dropped. A pipe or terminal that takes no bytes for a second loses text
until it does again, because a rank that waits for it would let its peers time out.
"""

import contextlib
import io
import os
import select
import sys
from typing import Any

CHUNK = 4096  # bytes that a ready pipe takes without blocking: PIPE_BUF
PATIENCE_S = 1.0


def protect() -> None:
    """Replace sys.stdout and sys.stderr; open /dev/null for standard streams that are closed, whose numbers files would get."""
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            os.set_inheritable(handle, True)
    for name, handle in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # the caller redirected it
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        options: dict[str, Any] = dict(errors="backslashreplace", line_buffering=name == "stderr" or os.isatty(handle))
        encoding = getattr(stream, "encoding", None) or "utf-8"
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(LossyFile(handle)), encoding=encoding, **options))


class LossyFile(io.RawIOBase):
    """A file descriptor whose writes always succeed."""

    def __init__(self, handle: int) -> None:
        self._handle, self._patience_s = handle, PATIENCE_S

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return os.isatty(self._handle)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with contextlib.suppress(OSError, ValueError):  # ValueError: select takes numbers below 1024
            for begin in range(0, len(view), CHUNK):
                if not select.select([], [self._handle], [], self._patience_s)[1]:
                    self._patience_s = 0.0
                    break
                self._patience_s = PATIENCE_S
                os.write(self._handle, view[begin : begin + CHUNK])
        return len(view)
