"""A rank's share of a checkpoint: the weights it owns with their moments, in files of at most `checkpoint.max_file_mib`.

Tensors are checked, hashed and written in a thread, overlapped with reading the next ones. A weight or a moment that is not
finite is not written.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.checkpoint.safetensors import Writer
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Engine

MAX_PENDING = 2**31  # bytes of tensors that wait for a rank's disk; a larger tensor waits alone
MAX_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)  # the square of a larger weight is infinite in fp32


class NotFiniteError(ValueError):
    """A tensor has NaN, infinity, or a weight whose square is infinite in fp32."""


def write_share(
    folder: Path, engine: Engine, distributed: DistributedContext, max_file_mib: int
) -> tuple[dict[str, dict[str, Any]], str]:
    """Write the weights that this rank owns, with their moments. All ranks call this together.

    Args:
        folder: an existing folder.
        engine: holds weights and moments.
        distributed: this rank's place in the job.
        max_file_mib: largest size of a file in MiB, unless one tensor is larger; 0: one file of each kind.
    Returns:
        (size and SHA-256 of each file by name, the problem or "").
    """
    owner = _assign_owners(engine, distributed.world)
    owned = [name for name in engine.names if owner[name] == distributed.rank]
    shapes = {name: engine.shape(name) for name in owned}
    moments = {f"{name}#{key}": shapes[name] for name in owned for key in engine.moments(name)}
    limit = max_file_mib * 2**20
    writers = {
        kind: SplitWriter(folder, f"{kind}-{distributed.rank:05d}", entries, limit)
        for kind, entries in (("weights", shapes), ("moments", moments))
    }
    problem = ""
    background = BackgroundWriter()
    for name in engine.names:
        values = engine.read(name)  # a collective: a rank with a full disk still takes part
        if owner[name] != distributed.rank or problem:
            continue
        try:
            background.add(writers["weights"], values["weight"])
            for key in engine.moments(name):
                background.add(writers["moments"], values[key])
        except (OSError, NotFiniteError) as error:
            problem = describe(error)
    try:
        background.close()
        if not problem:
            for writer in writers.values():
                writer.close()
    except (OSError, NotFiniteError) as error:
        problem = problem or describe(error)
    if problem:
        for writer in writers.values():
            writer.abandon()
    return {name: entry for writer in writers.values() for name, entry in writer.files.items()}, problem


def describe(error: OSError | NotFiniteError) -> str:
    """Return the reason of a failed save."""
    if isinstance(error, NotFiniteError):
        return str(error)
    return f"{error.strerror or error} ({Path(error.filename).name if error.filename else 'while writing'})"


class SplitWriter:
    """Writes fp32 tensors in a known order into stem.safetensors, stem-00001.safetensors and so on.

    Args:
        folder: the folder of the files.
        stem: the first file's name without its suffix.
        shapes: shape of each tensor by name, in the order of the calls of `add`. Names with # are moments.
        limit: largest size of a file's tensors in bytes, unless one tensor is larger; 0: no limit.
    """

    def __init__(self, folder: Path, stem: str, shapes: Mapping[str, tuple[int, ...]], limit: int) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self._folder, self._shapes, self._names = folder, shapes, iter(shapes)
        self._parts = _split(stem, shapes, limit)
        self._writer: Writer | None = None
        self._file, self._left = "", 0

    def add(self, tensor: Tensor) -> None:
        """Append the next tensor; raise a NotFiniteError, naming it, if it must not be saved."""
        name = next(self._names)
        _require_finite(name, tensor)
        if not self._left:
            self._next_file()
        assert self._writer is not None
        self._writer.add(tensor)
        self._left -= 1
        if not self._left:
            self._finish_file()

    def close(self) -> None:
        """Assert that all tensors are written; a rank that owns none writes an empty file."""
        assert next(self._names, None) is None, "tensors were announced but not written"
        if not self.files:
            self._next_file()
            self._finish_file()

    def abandon(self) -> None:
        """Close an incomplete file."""
        if self._writer is not None:
            self._writer.abandon()

    def _next_file(self) -> None:
        self._file, names = next(self._parts)
        entries = {name: (torch.float32, self._shapes[name]) for name in names}
        self._writer, self._left = Writer(self._folder / self._file, entries, {}), len(names)

    def _finish_file(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self.files[self._file] = dict(size=self._writer.size, sha256=self._writer.digest)


def _split(stem: str, shapes: Mapping[str, tuple[int, ...]], limit: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (file name, names of its tensors)."""
    numbers = itertools.count()
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * torch.float32.itemsize
        if names and limit and size + nbytes > limit:
            yield _file_name(stem, next(numbers)), names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield _file_name(stem, next(numbers)), names


def _file_name(stem: str, number: int) -> str:
    return f"{stem}-{number:05d}.safetensors" if number else f"{stem}.safetensors"


def _require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.numel():
        return
    low, high = (float(x) for x in tensor.aminmax())  # both are NaN if any element is
    largest = max(-low, high)
    if not math.isfinite(low + high) or ("#" not in name and largest > MAX_WEIGHT):
        raise NotFiniteError(f"{name} is not finite: its elements reach from {low:g} to {high:g}")


class BackgroundWriter:
    """Writes tensors in order, in a thread: ranks wait for each other to read a tensor, but not for a slow disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: deque[tuple[int, Future[None]]] = deque()  # (bytes, write) of each tensor
        self._failed = False

    def add(self, writer: SplitWriter, tensor: Tensor) -> None:
        """Enqueue a tensor; wait while MAX_PENDING bytes are pending. Raise the error of an earlier write."""
        while self._pending and (
            self._pending[0][1].done() or sum(size for size, _ in self._pending) + tensor.nbytes > MAX_PENDING
        ):
            self._pending.popleft()[1].result()
        self._pending.append((tensor.nbytes, self._thread.submit(self._write, writer, tensor.cpu())))

    def _write(self, writer: SplitWriter, tensor: Tensor) -> None:
        """Write a tensor, unless an earlier write failed: the writer would take it for the next one that it expects."""
        if self._failed:
            return
        try:
            writer.add(tensor)
        except BaseException:
            self._failed = True
            raise

    def close(self) -> None:
        """Wait until all tensors are written, or raise the first error. The thread has ended on return."""
        try:
            for _, write in self._pending:
                write.result()
        finally:
            self._thread.shutdown(cancel_futures=True)


def _assign_owners(engine: Engine, world: int) -> dict[str, int]:
    """Assign weights to ranks, largest first, each to the rank with the smallest load."""
    load = [0] * world
    owner = {}
    for name in sorted(engine.names, key=lambda name: (-int(np.prod(engine.shape(name))), name)):
        owner[name] = min(range(world), key=lambda rank: load[rank])
        load[owner[name]] += int(np.prod(engine.shape(name)))
    return owner
