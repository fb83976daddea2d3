"""File operations of checkpoints, run folders and caches: writes that a kill cannot cut, and reads that a file cannot block.

A file that replaces another is written under a temporary name, flushed to disk and renamed. A folder is renamed before its
files are deleted. After a kill or a crash at any moment a name therefore holds its old content or its new content.
Reads accept regular files only, so that a FIFO or a device cannot hang a start, and JSON of any depth raises a ValueError.
Every operation calls `observer`, with which tests record the order of operations and kill a process before or after each.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

MAX_JSON = 256 * 2**20  # bytes; metrics.jsonl of a million steps has about as many
observer: Callable[[str, str, Path], None] | None = None  # called with ("before" or "after", operation, path)


@contextlib.contextmanager
def _observed(operation: str, path: Path) -> Iterator[None]:
    if observer is not None:
        observer("before", operation, path)
    yield
    if observer is not None:
        observer("after", operation, path)


def create(path: Path) -> FileIO:
    """Create an empty file for writing; a file or a symbolic link of that name is deleted first."""
    if os.path.lexists(path):
        remove(path)
    with _observed("create", path):
        return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def write(file: FileIO, path: Path, data: bytes | memoryview) -> None:
    """Write all of `data` to a file that `create` returned; `path` is its name."""
    with _observed("write", path):
        left = memoryview(data).cast("B")
        while left:
            left = left[file.write(left) or 0 :]


def sync(file: FileIO, path: Path) -> None:
    """Flush a file to disk."""
    with _observed("sync", path):
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    with _observed("sync", path):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder; an existing file of the new name is replaced."""
    with _observed("rename", source):
        os.replace(source, target)


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    with _observed("mkdir", path):
        path.mkdir(parents=True)


def remove(path: Path) -> None:
    """Delete a file, a symbolic link or a folder with its content. Links are not followed."""
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            remove(child)
        with _observed("delete", path):
            path.rmdir()
        return
    with _observed("delete", path):
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete a folder, renamed to NAME.old first: a kill leaves no folder of that name with a part of its files."""
    old = path.with_name(path.name + ".old")
    if os.path.lexists(old):
        remove(old)
    rename(path, old)
    remove(old)


def replace(path: Path, data: bytes) -> None:
    """Write a file as a whole: under a temporary name, flushed, then renamed."""
    part = path.with_name(path.name + ".part")
    try:
        with create(part) as file:
            write(file, part, data)
            sync(file, part)
        rename(part, path)
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk its bytes are needed
            part.unlink()
        raise


def open_append(path: Path) -> FileIO:
    """Open a file for appending, and create it if it is absent. A symbolic link or a special file raises an OSError."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, which a run does not write through: delete it", str(path))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _regular(os.open(path, flags, 0o666), path, "ab+")


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; a folder, FIFO, socket or device raises an OSError at once."""
    return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path, "rb")


def _regular(handle: int, path: Path, mode: str) -> FileIO:
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return FileIO(handle, mode)
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read(path: Path, limit: int = MAX_JSON) -> bytes:
    """Return the content of a regular file; raise a ValueError if it has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path.name} has {size} bytes, and at most {limit} are read")
        return file.readall()


def parse_json(data: bytes) -> Any:
    """Parse JSON of any origin.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deep, or an object has a name twice.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular file; raise a ValueError that names the file if it is damaged."""
    try:
        content = parse_json(read(path))
    except ValueError as error:
        raise ValueError(f"{path.name} is not readable: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not readable: it is no JSON object")
    return content
