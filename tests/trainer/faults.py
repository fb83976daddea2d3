"""Faults for tests: a process that dies at a file operation, randomly damaged files, forged checkpoints, ranks as threads."""

import contextlib
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringspan.trainer import files
from ringspan.trainer.config.compose import ConfigError


class Died(BaseException):
    """The process ends here: no handler of an OSError or a ValueError continues it."""


class Death:
    """Ends a simulated process at one file operation: all its later operations fail as well.

    Args:
        point: number of the call of the observer, from 1; two per operation, before and after it. 0: it never dies.
        concerns: whether an operation on this path is one of the process.
    """

    def __init__(self, point: int, concerns: Callable[[Path], bool] = lambda path: True) -> None:
        self.point, self.concerns, self.count = point, concerns, 0

    def __call__(self, when: str, operation: str, path: Path) -> None:
        if self.concerns(path):
            self.count += 1
            if self.point and self.count >= self.point:
                raise Died


@contextlib.contextmanager
def observed(observer: Callable[[str, str, Path], None]) -> Iterator[None]:
    """Let `observer` see every file operation."""
    files.observer = observer
    try:
        yield
    finally:
        files.observer = None


def kill_at_operation(point: int) -> list[int]:
    """Kill this process with SIGKILL at a call of the observer, before or after a file operation. Return the counted calls."""
    count = [0]

    def observer(when: str, operation: str, path: Path) -> None:
        count[0] += 1
        if count[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)

    files.observer = observer
    return count


def unsafe_renames(operations: list[tuple[str, str, Path]]) -> list[str]:
    """Renames of recorded operations that a crash of the machine could expose with unwritten data.

    A file must be flushed between its last write and the rename of it or of its folder, and so must the folder.
    """
    dirty: set[Path] = set()
    found = []
    for when, operation, path in operations:
        if when == "before" and operation == "rename":
            found += [f"{path.name} is renamed before {other.name} is flushed" for other in dirty if other.is_relative_to(path)]
            if path.parent in dirty and not path.suffix:
                found.append(f"{path.name} is discarded before the rename of its successor is flushed")
        elif when == "after" and operation == "rename":
            dirty.add(path.parent)
        elif when == "after" and operation in ("create", "write"):
            dirty |= {path} | ({path.parent} if operation == "create" else set())
        elif when == "after" and operation == "mkdir":
            dirty.add(path)
        elif (when == "after" and operation == "sync") or (when == "after" and operation == "delete"):
            dirty.discard(path)
    return found


def seal(checkpoint: Path) -> None:
    """Write the manifest that fits a checkpoint's files, as after a forged change."""
    entries = {
        path.name: dict(size=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(checkpoint.iterdir())
        if path.name != "manifest.json" and path.is_file()
    }
    (checkpoint / "manifest.json").write_text(json.dumps(dict(format=1, files=entries)))


class SingleRank:
    """A DistributedContext of one rank, without torch.distributed."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def call_on_all_ranks(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None


class ThreadRank:
    """A DistributedContext whose ranks are threads; the others fail when one has died."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world, self._barrier, self._values = rank, world, barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(10)
        gathered = json.loads(json.dumps(self._values))  # as between processes
        self._barrier.wait(10)
        return gathered

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def run_threads(world: int, job: Callable[[Any], Any]) -> list[Any]:
    """Call job(rank's context) on each of `world` threads; return results, or the error of a thread."""
    barrier, values = threading.Barrier(world), [None] * world
    results: list[Any] = [None] * world

    def call(rank: int) -> None:
        try:
            results[rank] = job(ThreadRank(rank, world, barrier, values))
        except BaseException as error:  # a dead rank ends the others' collectives
            results[rank] = error
            time.sleep(0.05)  # the others may still be leaving the barrier of a common error
            barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


ODD: list[Any] = [
    None, True, -1, 0, 1, 2**63, 1e308, -0.5, "", "x", "../x", "${oc.env:SECRET}", [], [0], {}, {"": 0}, [[[[]]]], "F32",
    "é" * 50, 10**30,
]  # fmt: skip


def mutate(data: bytes, choose: random.Random) -> bytes:
    """Return damaged data; it may be equal."""
    kinds = [_flip, _cut, _swap, _add]
    if data[:1] in (b"{", b"["):
        kinds += [_change_json] * 3
    elif len(data) > 8 and data[8:9] == b"{":  # a safetensors file
        kinds += [_change_header] * 3
    return choose.choice(kinds)(data, choose)


def _flip(data: bytes, choose: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 8])):
        if changed:
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def _cut(data: bytes, choose: random.Random) -> bytes:
    begin = choose.randrange(len(data) + 1)
    return data[:begin] if choose.random() < 0.5 else data[:begin] + data[begin + choose.choice([1, 4, 64]) :]


def _swap(data: bytes, choose: random.Random) -> bytes:
    size = choose.choice([1, 4, 16])
    a, b = sorted(choose.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def _add(data: bytes, choose: random.Random) -> bytes:
    at, begin = choose.randrange(len(data) + 1), choose.randrange(len(data) + 1)
    new = choose.choice([choose.randbytes(choose.choice([1, 8, 100])), data[begin : begin + 50], b"[" * 2000, b"\n7\n", b"\0"])
    return data[:at] + new + data[at:]


def _change_json(data: bytes, choose: random.Random) -> bytes:
    """Change a value, or a name, of one JSON object or of one line of them."""
    lines = data.splitlines(keepends=True) if b"\n{" in data else [data]
    number = choose.randrange(len(lines))
    try:
        content = json.loads(lines[number])
    except ValueError:
        return _flip(data, choose)
    places = list(_places(content))
    if places:
        node, key = choose.choice(places)
        action = choose.random()
        if action < 0.6:
            node[key] = choose.choice(ODD)
        elif action < 0.8:
            del node[key]
        elif isinstance(node, dict):
            node[choose.choice(["x", "step", f"{key}x"])] = node[key]
        else:
            node.append(node[key])
    lines[number] = json.dumps(content).encode() + b"\n" * lines[number].endswith(b"\n")
    return b"".join(lines)


def _change_header(data: bytes, choose: random.Random) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    text = _change_json(data[8:end], choose) if choose.random() < 0.8 else _flip(data[8:end], choose)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _places(node: Any) -> Any:
    """Yield (container, key) of every value."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, value in items[:200]:  # a random state has 625 numbers
        yield node, key
        yield from _places(value)
