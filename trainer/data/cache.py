"""The token cache: folders that are made once, with a checksum of every page.

    <data.cache>/<hash of the key>/
        tokens.bin, ends.npy    content, which `make` writes
        pages.bin               CRC-32 of each page of each file, uint32
        manifest.json           size and SHA-256 of each file; files outside of the folder (token shards) by their path

A folder is made under another name, flushed to disk and renamed: it is whole or absent. Each start compares all sizes and some
pages, or all pages with data.verify=full. A folder that differs is made again, and a line says so.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from ringspan.trainer import files

PAGE = 2**18  # bytes per CRC-32: 16 MiB of checksums for a TiB of tokens
SAMPLE = 32  # pages that a start compares: 8 MiB
MANIFEST, PAGES = "manifest.json", "pages.bin"


class PageSums:
    """Size, SHA-256 and CRC-32 by page of the bytes that are added in order."""

    def __init__(self) -> None:
        self.size, self.sha256, self.pages = 0, hashlib.sha256(), list[int]()

    def add(self, data: Any) -> None:
        """Add a contiguous buffer."""
        view = memoryview(data).cast("B")
        self.sha256.update(view)
        while view:
            start = self.size % PAGE
            if start == 0:
                self.pages.append(0)
            part = view[: PAGE - start]
            self.pages[-1] = zlib.crc32(part, self.pages[-1])
            self.size, view = self.size + len(part), view[len(part) :]


@dataclass(frozen=True)
class Entry:
    """A file of the manifest: bytes offset … offset + size − 1 of `name`, a name in the folder or an absolute path."""

    name: str
    offset: int
    size: int
    sha256: str

    @property
    def num_pages(self) -> int:
        return -(-self.size // PAGE)


class Builder:
    """Writes the files of a new folder and collects their checksums.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs: list[tuple[str, int, str]] = []  # (path, size, hash) of each file that the content was made of
        self._entries: list[Entry] = []
        self._pages: list[int] = []

    def add(self, name: str, sums: PageSums, offset: int = 0) -> None:
        """Add a file to the manifest. A file outside of the folder has an absolute path."""
        self._entries.append(Entry(name, offset, sums.size, sums.sha256.hexdigest()))
        self._pages += sums.pages

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator["_Writer"]:
        """Open a file of the folder for writing. It is flushed to disk and added to the manifest at the end of the block."""
        path = self.folder / name
        with files.create(path) as file:
            writer = _Writer(file, path)
            yield writer
            writer.flush()
            files.sync(file, path)
        self.add(name, writer.sums)

    def finish(self) -> None:
        """Write the checksums and flush the folder to disk."""
        pages = np.array(self._pages, "<u4").tobytes()
        manifest: dict[str, Any] = dict(format=1, pages=hashlib.sha256(pages).hexdigest(), inputs=self.inputs)
        manifest["files"] = [asdict(entry) for entry in self._entries]
        manifest["sha256"] = _digest(manifest)
        for name, data in ((PAGES, pages), (MANIFEST, json.dumps(manifest).encode())):
            path = self.folder / name
            with files.create(path) as file:
                files.write(file, path, data)
                files.sync(file, path)
        files.sync_folder(self.folder)


class _Writer:
    """A buffered file whose bytes are summed as they are written."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self.sums, self._file, self._path, self._buffer = PageSums(), file, path, bytearray()

    def write(self, data: Any) -> int:
        self._buffer += data
        if len(self._buffer) >= PAGE:
            self.flush()
        return len(data)

    def flush(self) -> None:
        self.sums.add(self._buffer)
        files.write(self._file, self._path, memoryview(self._buffer))
        self._buffer = bytearray()


class CachedFolder:
    """A folder of the cache, opened for reading.

    Args:
        path: the folder.
    Raises:
        Damaged: the manifest or the checksums are missing or not as they were written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            manifest = files.read_json(path / MANIFEST)
            pages = files.read(path / PAGES, limit=2**40)
            if manifest.pop("sha256") != _digest(manifest) or manifest["format"] != 1:
                raise Damaged(f"{path / MANIFEST} has changed since it was written")
            if hashlib.sha256(pages).hexdigest() != manifest["pages"]:
                raise Damaged(f"{path / PAGES} has changed since it was written")
            self.entries = [Entry(**entry) for entry in manifest["files"]]
            self.inputs = [(str(name), int(size), str(digest)) for name, size, digest in manifest["inputs"]]
            self._pages = np.frombuffer(pages, "<u4")
            self._first = np.cumsum([0, *(entry.num_pages for entry in self.entries)])
        except PermissionError:
            raise
        except OSError as error:
            raise Damaged(f"{error.filename}: {error.strerror}") from None
        except Damaged:
            raise
        except (ValueError, KeyError, TypeError):
            raise Damaged(f"{path / MANIFEST} is not readable") from None

    @property
    def sha256(self) -> str:
        """Hash of the content of all files, whatever their names."""
        return hashlib.sha256("".join(entry.sha256 for entry in self.entries).encode()).hexdigest()

    @property
    def is_external(self) -> bool:
        """Whether the content is in files outside of the folder."""
        return any(os.path.isabs(entry.name) for entry in self.entries)

    @property
    def files(self) -> list[tuple[str, int, str]]:
        """(path, size, hash) of each file that the content comes from."""
        return self.inputs or [(entry.name, entry.size, entry.sha256) for entry in self.entries if os.path.isabs(entry.name)]

    def verify(self, full: bool) -> None:
        """Compare the sizes of all files, and all pages or a sample of them.

        The sample depends on the hour only, so that all ranks of a start find the same damage.

        Raises:
            Damaged: a file is missing or has changed.
        """
        for entry in self.entries:
            file = self.path / entry.name
            if not file.is_file():
                raise Damaged(f"{file} is missing")
            if (os.path.getsize(file) - entry.offset) != entry.size:
                raise Damaged(f"{file} has {os.path.getsize(file)} bytes, not {entry.offset + entry.size}")
        pages = range(len(self._pages))
        chosen: Sequence[int] = pages
        if not full:
            draw = random.Random(f"{self.path.name} {time.time() // 3600:.0f}")
            own = [i for i, entry in enumerate(self.entries) if not os.path.isabs(entry.name) and entry.size]
            ends = {int(page) for i in own for page in (self._first[i], self._first[i + 1] - 1)}
            chosen = sorted(ends | set(draw.sample(pages, min(SAMPLE, len(pages)))))
        numbers = np.searchsorted(self._first, chosen, side="right") - 1
        for number in np.unique(numbers):
            self.verify_pages(int(number), np.asarray(chosen)[numbers == number] - self._first[number])

    def verify_pages(self, number: int, pages: Sequence[int] | np.ndarray) -> None:
        """Compare some pages of the file `number` of the manifest; raise Damaged if one has changed."""
        entry = self.entries[number]
        name = self.path / entry.name
        with files.open_regular(name) as file:
            for page in pages:
                begin = int(page) * PAGE
                size = min(PAGE, entry.size - begin)
                data = os.pread(file.fileno(), size, entry.offset + begin)
                if len(data) != size or zlib.crc32(data) != self._pages[self._first[number] + page]:
                    raise Damaged(f"{name} has changed since its checksum was made, near byte {entry.offset + begin}")


class Damaged(ValueError):
    """A file is not what was written; the message names it."""


def open_cached(cache: str, key: list[Any], make: Callable[[Builder], None], full: bool = False) -> CachedFolder:
    """Return the folder of a key. One process of the machine makes it; the other processes wait.

    Args:
        cache: the cache folder.
        key: names the folder.
        make: writes the content.
        full: verify every page instead of a sample.
    Raises:
        ValueError: the cache cannot be written.
    """
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    root = Path(cache).expanduser()
    try:
        try:
            return _open(root / name, full)  # without the lock: the ranks of a machine verify concurrently
        except Damaged:
            return _make_once(root, name, make, full)
    except OSError as error:
        raise ValueError(f"data.cache={cache!r} is no folder that can be written to: {error}; give another one") from None


def _open(path: Path, full: bool) -> CachedFolder:
    folder = CachedFolder(path)
    try:
        folder.verify(full)
    except FileNotFoundError as error:  # another process has just discarded the damaged folder
        raise Damaged(f"{error.filename} is missing") from None
    return folder


def _make_once(root: Path, name: str, make: Callable[[Builder], None], full: bool) -> CachedFolder:
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        problem = _lock_exclusively(lock)
        try:
            return _open(root / name, full)
        except Damaged as damage:
            if (root / name).exists():
                _say(f"data.cache: {damage}; the folder is made again")
                with contextlib.suppress(FileNotFoundError):  # without locks another process may have been faster
                    files.discard(root / name)
        if problem:
            _say(f"{root}: this file system has no locks ({problem}), so every process tokenizes for itself")
        else:
            for stale in root.glob(f"{name}.[0-9o]*"):  # left by a killed process, possibly with the same process id
                files.remove(stale)
        new = root / f"{name}.{os.getpid()}-{platform.node()}"
        if new.exists():
            files.remove(new)
        files.make_folder(new)
        try:
            builder = Builder(new)
            make(builder)
            builder.finish()
            files.rename(new, root / name)
            files.sync_folder(root)
        except OSError:
            if not (root / name).exists():  # without locks another process may have been faster
                raise
        finally:
            if new.exists():
                files.remove(new)
    return CachedFolder(root / name)


def _lock_exclusively(lock: IO[str]) -> str:
    """Wait for the lock. Return "", or the reason why the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if the process dies
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the run continues without a terminal
        print(text, flush=True)
