"""Best-fit packing: documents, and the rests of documents longer than a window, in windows of a fixed length.

A document longer than a window fills whole windows. Its rest, and each shorter document, goes into the fullest window that has
space for it, the longest first. Few documents are cut, and the unused end of a window is padding.
"""

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

NO_TOKEN = -1  # stream position of padding


class Bins(NamedTuple):
    """Pieces of documents in windows: window i has the pieces first[i] … first[i + 1] − 1.

    `cut` is the share of the documents that are in several windows, `stream_cut` the same of a stream without padding.
    """

    first: np.ndarray  # int64 (windows + 1,)
    starts: np.ndarray  # int64 (pieces,): position in the stream
    sizes: np.ndarray  # int64 (pieces,)
    length: int
    cut: float
    stream_cut: float

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def padding(self) -> float:
        """Share of the tokens of all windows that are padding."""
        return 1 - float(self.sizes.sum()) / (len(self) * self.length)

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stream positions (length,) of a window's tokens, NO_TOKEN for padding, and the lengths of its documents.

        The padding counts as a document, the last one.
        """
        pieces = slice(self.first[index], self.first[index + 1])
        positions = np.full(self.length, NO_TOKEN)
        begin = 0
        for start, size in zip(self.starts[pieces], self.sizes[pieces], strict=True):
            positions[begin : begin + size] = np.arange(start, start + size)
            begin += size
        sizes = self.sizes[pieces]
        return positions, sizes if begin == self.length else np.append(sizes, self.length - begin)


def best_fit(documents: Iterable[int], length: int) -> Bins:
    """Pack documents into windows.

    Args:
        documents: tokens of each document, in the order of the stream.
        length: tokens of a window.
    """
    sizes = np.fromiter(documents, np.int64)
    starts = np.cumsum(sizes) - sizes
    whole, rest = np.divmod(sizes, length)
    windows = [[(int(start) + i * length, length)] for start, num in zip(starts, whole, strict=True) for i in range(num)]
    free: dict[int, list[int]] = {}  # unused tokens: windows that have as many
    amounts: list[int] = []  # the keys of `free`, sorted
    for document in np.argsort(-rest, kind="stable"):
        size = int(rest[document])
        if not size:
            break
        piece = int(starts[document] + whole[document] * length), size
        place = bisect.bisect_left(amounts, size)
        if place == len(amounts):
            windows.append([piece])
            left, window = length - size, len(windows) - 1
        else:
            amount = amounts[place]
            window = free[amount].pop()
            if not free[amount]:
                del free[amount], amounts[place]
            windows[window].append(piece)
            left = amount - size
        if left:
            if left not in free:
                bisect.insort(amounts, left)
            free.setdefault(left, []).append(window)
    pieces = [piece for window in windows for piece in window]
    first = np.cumsum([0, *map(len, windows)])
    cut = float((sizes > length).mean())
    stream_cut = float((starts // length != (starts + sizes - 1) // length).mean())
    return Bins(
        first, np.array([start for start, _ in pieces]), np.array([size for _, size in pieces]), length, cut, stream_cut
    )
