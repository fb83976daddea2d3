"""A file of token ids, read like an array."""

import itertools
import os
from pathlib import Path

import numpy as np

from ringspan.trainer.data.cache import Damaged

MAX_GAP = 4096  # tokens: positions that are no farther apart are read at once


class TokenFile:
    """Token ids in a file, after a header. Each access reads from the file.

    It is not a memory map: access to a map whose file was cut short ends the process with SIGBUS.

    Args:
        path: the file.
        dtype: type of an id.
        header: bytes before the first id.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, header: int = 0) -> None:
        self.path, self.dtype, self.header = path, dtype, header
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as the object lives)
        self._length = (os.fstat(self._file.fileno()).st_size - header) // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """Return the ids in a slice without a step, or at indices (n,).

        Raises:
            Damaged: the file was cut short since it was opened, or cannot be read.
        """
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return self._read(begin, end)
        steps = np.diff(index)
        cuts = [0, *(np.flatnonzero((steps < 0) | (steps > MAX_GAP)) + 1), len(index)]
        out = np.empty(len(index), self.dtype)
        for first, last in itertools.pairwise(cuts):
            if last > first:
                begin = int(index[first])
                out[first:last] = self._read(begin, int(index[last - 1]) + 1)[index[first:last] - begin]
        return out

    def _read(self, begin: int, end: int) -> np.ndarray:
        data, offset = bytearray((end - begin) * self.dtype.itemsize), self.header + begin * self.dtype.itemsize
        view = memoryview(data)
        while view:
            try:
                num = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise Damaged(f"{self.path} cannot be read: {error.strerror}") from None
            if not num:
                size, expected = os.fstat(self._file.fileno()).st_size, self.header + len(self) * self.dtype.itemsize
                raise Damaged(f"{self.path} has {size} bytes, not {expected}: it was cut short since it was opened")
            view, offset = view[num:], offset + num
        return np.frombuffer(data, self.dtype)
