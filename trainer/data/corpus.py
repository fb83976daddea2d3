"""Text on disk as one stream of tokens: an end token closes each document, and a begin token may open it.

    open_source ─ text, stdlib: tokenized once into the cache folder ─┐
                ─ tokens: shards tokenized by another program ────────┴→ TokenStream (memory-mapped) → Corpus of dataset.py

A rank reads only the tokens it asks for; an index holds the positions of the document ends. Documents are ordered by the hash
of their contents, and equal texts count once, so the order depends neither on the machine nor on file names. The last documents
are held out.

The stream is circular: a window near its end continues at its start. Windows therefore need no padding, and each epoch can cut
the same documents at other positions.
"""

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ringspan.trainer.config.schema import Source
from ringspan.trainer.data.tokenizer import Tokenizer

MAX_HELD_OUT = 2**24  # tokens; more would not make the held-out loss more precise
NO_LABEL = -100
BATCH = 2**22  # bytes of text per call of the tokenizer


class TokenStream:
    """A circular stream over the tokens first … last − 1 of some shards.

    Args:
        shards: token ids, each of shape (n,).
        ends: sorted positions, in the concatenated shards, of the last token of each document.
        first, last: range of the stream; all tokens by default.
    """

    def __init__(self, shards: Sequence[np.ndarray], ends: np.ndarray, first: int = 0, last: int | None = None) -> None:
        self.shards, self.ends, self.first = shards, ends, first
        self.begins = np.cumsum([0, *(len(shard) for shard in shards)])
        self.last = int(self.begins[-1]) if last is None else last

    def __len__(self) -> int:
        return self.last - self.first

    def subset(self, held_out: bool, share: float) -> "TokenStream":
        """Return the held-out part of the stream, or the part to train on. The cut is at a nearby document end if there is one.

        Args:
            held_out: which of the two parts to return.
            share: share of the tokens to hold out, at most MAX_HELD_OUT tokens.
        Raises:
            ValueError: no tokens are left to train on.
        """
        num = max(min(int(len(self) * share), MAX_HELD_OUT), 2)
        cut = self.last - num
        index = int(np.searchsorted(self.ends, cut))
        nearby = [int(end) + 1 for end in self.ends[max(index - 1, 0) : index + 1]]
        cut = min((end for end in nearby if abs(end - cut) <= num // 2), key=lambda end: abs(end - cut), default=cut)
        if cut < self.first + 2:
            raise ValueError(f"data.held_out={share} leaves nothing of {len(self)} tokens to train on; add text")
        return (
            TokenStream(self.shards, self.ends, cut, self.last)
            if held_out
            else TokenStream(self.shards, self.ends, self.first, cut)
        )

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens, int64 (n,), at positions (n,); positions past the end wrap around."""
        indices = self.first + positions % len(self)
        if len(self.shards) == 1:
            return self.shards[0][indices].astype(np.int64)
        out = np.empty(len(positions), np.int64)
        shard = np.searchsorted(self.begins, indices, side="right") - 1
        for i in np.unique(shard):
            rows = shard == i
            out[rows] = self.shards[i][indices[rows] - self.begins[i]]
        return out

    def lengths(self, start: int, length: int) -> np.ndarray:
        """Return the lengths of the documents, or parts of documents, in the window [start, start + length)."""
        window_ends: list[np.ndarray] = []
        for lap in range(start // len(self), (start + length - 1) // len(self) + 1):
            shift = lap * len(self) - self.first
            lo, hi = max(start, lap * len(self)), min(start + length, (lap + 1) * len(self))
            a, b = np.searchsorted(self.ends, [lo - shift, hi - shift])
            # The end of a lap and of the window also ends a document.
            window_ends += [np.asarray(self.ends[a:b]) + shift, np.array([hi - 1])]
        return np.diff(np.unique(np.concatenate(window_ends)) - start, prepend=-1)

    def is_end(self, positions: np.ndarray) -> np.ndarray:
        """Return whether each position, (n,), is the last token of a document; bool (n,)."""
        indices = self.first + positions % len(self)
        nearest = np.searchsorted(self.ends, indices)
        result = np.zeros(len(positions), bool)
        inside = nearest < len(self.ends)
        result[inside] = self.ends[nearest[inside]] == indices[inside]
        return result | (indices == self.last - 1)


def text_files(paths: Sequence[str]) -> list[Path]:
    """Expand files, folders and glob patterns into files, each once. Folders exclude hidden files."""
    result: dict[Path, None] = {}
    for path in paths:
        name = os.path.expanduser(path)
        if os.path.isdir(name):
            inside = (Path(folder) / file for folder, _, files in os.walk(name) for file in files)
            files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(name).parts)]
        else:
            files = [Path(name)] if os.path.isfile(name) else [Path(p) for p in glob.glob(name, recursive=True)]
        files = [p for p in files if p.is_file()]
        if not files:
            raise ValueError(f"paths: {path!r} matches no file; give files, folders or glob patterns such as 'docs/**/*.md'")
        result.update(dict.fromkeys(sorted(files)))
    return list(result)


@functools.cache
def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library, without its tests and without installed packages."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    result = []
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - skip  # os.walk does not enter them: installed packages can be 20 times as many files
        result += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(result)


def open_source(source: Source, tokenizer: Tokenizer, vocabulary: int, cache: str) -> TokenStream:
    """Open a source of kind text, stdlib or tokens as a stream of tokens. Tokenize text if the cache does not have it.

    Args:
        source: options of the source.
        tokenizer: the run's tokenizer; kind tokens does not use it.
        vocabulary: exclusive bound of the ids in token shards.
        cache: the cache folder.
    Raises:
        ValueError: a path matches nothing, a file cannot be read, or a shard contradicts its options.
    """
    if source.kind == "tokens":
        return _token_shards(source, vocabulary, cache)
    if source.kind == "text" and not source.paths:
        raise ValueError("paths is empty: a source of kind text needs files, folders or glob patterns")
    files = stdlib_files() if source.kind == "stdlib" else text_files(source.paths)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    folder = _cached(
        cache,
        ["text", tokenizer.fingerprint, source.text_key, _file_signatures(files)],
        lambda new: _tokenize(files, source, tokenizer, dtype, new),
    )
    return TokenStream([np.memmap(folder / "tokens.bin", dtype, "r")], np.load(folder / "ends.npy", mmap_mode="r"))


def _tokenize(files: Sequence[Path], source: Source, tokenizer: Tokenizer, dtype: np.dtype, folder: Path) -> None:
    """Write tokens.bin and ends.npy in two passes: hash and locate every document, then tokenize in the order of the hashes."""
    locations: dict[bytes, tuple[Path, int, int]] = {}
    for file in files:
        with _naming(file):
            for begin, size, text in _documents(file, source.text_key):
                locations.setdefault(hashlib.blake2b(text, digest_size=16).digest(), (file, begin, size))
    if not locations:
        raise ValueError(f"paths={list(source.paths)}: {len(files)} files without any text")
    begin_ids, end_ids = np.array(tokenizer.begin, dtype), np.array([tokenizer.end], dtype)
    ends, position = [], 0
    with (folder / "tokens.bin").open("wb") as out:
        for batch in _batches(locations[digest] for digest in sorted(locations)):
            texts = [_read(*location, source.text_key) for location in batch]
            for ids in tokenizer.encode(texts):
                out.write(np.concatenate([begin_ids, ids.astype(dtype), end_ids]).tobytes())
                position += len(begin_ids) + len(ids) + 1
                ends.append(position - 1)
    np.save(folder / "ends.npy", np.asarray(ends, np.int64))


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file in an OSError, which has no filename once the file is open."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None


def _documents(file: Path, text_key: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, size, text) of each document in a file. A binary file has none."""
    if file.suffix != ".jsonl":
        text = file.read_bytes()
        if text and b"\0" not in text[:8192]:
            yield 0, len(text), text
        return
    begin = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                text = _line_text(line, text_key, f"{file}:{number}")
                if text:
                    yield begin, len(line), text
            begin += len(line)


def _line_text(line: bytes, text_key: str, location: str) -> bytes:
    try:
        return json.loads(line)[text_key].encode(errors="replace")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{location} is no JSON object with text under {text_key!r}: set the source's text_key") from None


def _read(file: Path, begin: int, size: int, text_key: str) -> bytes:
    with _naming(file), file.open("rb") as data:
        data.seek(begin)
        text = data.read(size)
    return _line_text(text, text_key, str(file)) if file.suffix == ".jsonl" else text


def _batches(locations: Iterator[tuple[Path, int, int]]) -> Iterator[list[tuple[Path, int, int]]]:
    batch: list[tuple[Path, int, int]] = []
    total = 0
    for location in locations:
        batch.append(location)
        total += location[2]
        if total >= BATCH or len(batch) == 1024:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _token_shards(source: Source, vocabulary: int, cache: str) -> TokenStream:
    if not source.paths:
        raise ValueError("paths is empty: a source of kind tokens needs shards, such as 'data/*.bin'")
    files, dtype = text_files(source.paths), np.dtype(source.dtype)
    shards: list[np.ndarray] = []
    for file in files:
        size = file.stat().st_size - source.header
        if size < 1 or size % dtype.itemsize:
            raise ValueError(f"{file} has {size} bytes after its header of {source.header}: no number of {dtype} tokens")
        shards.append(np.memmap(file, dtype, "r", offset=source.header))
    begins = np.cumsum([0, *(len(shard) for shard in shards)])

    def index(folder: Path) -> None:
        chunk, ends, largest = 2**24, [np.zeros(0, np.int64)], 0
        for shard, begin in zip(shards, begins, strict=False):
            for offset in range(0, len(shard), chunk):
                ids = shard[offset : offset + chunk]
                largest = max(largest, int(ids.max()))
                if source.end_token >= 0:
                    ends.append(np.flatnonzero(ids == source.end_token) + begin + offset)
        if largest >= vocabulary:
            raise ValueError(
                f"the shards hold the id {largest}, but the vocabulary has {vocabulary}: set model.vocabulary or the tokenizer "
                "that made them, and the right dtype and header"
            )
        np.save(folder / "ends.npy", np.concatenate(ends))

    key = ["tokens", source.dtype, source.header, source.end_token, vocabulary, _file_signatures(files)]
    return TokenStream(shards, np.load(_cached(cache, key, index) / "ends.npy", mmap_mode="r"))


def _file_signatures(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file: cheap enough for every rank of every start and thousands of files."""
    stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _cached(cache: str, key: list[Any], make: Callable[[Path], None]) -> Path:
    """Return the folder of a key. One process of the machine makes it; the other processes wait."""
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    try:
        return _make_once(Path(cache).expanduser(), name, make)
    except OSError as error:
        raise ValueError(f"data.cache={cache!r} is no folder that can be written to: {error}; give another one") from None


def _make_once(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        problem = _lock_exclusively(lock)
        if (root / name).exists():
            return root / name
        if problem:
            print(f"{root}: this file system has no locks ({problem}), so every process tokenizes for itself", flush=True)
        else:
            for stale in root.glob(f"{name}.[0-9]*"):  # left by a killed process, possibly with the same process id
                shutil.rmtree(stale)
        new = root / f"{name}.{os.getpid()}-{platform.node()}"
        new.mkdir(exist_ok=True)
        try:
            make(new)
            new.rename(root / name)
        except OSError:
            if not (root / name).exists():  # without locks another process may have been faster
                raise
        finally:
            if new.exists():
                for file in new.iterdir():
                    file.unlink()
                new.rmdir()
    return root / name


def _lock_exclusively(lock: IO[str]) -> str:
    """Wait for the lock. Return "", or the reason why the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if the process dies
    except OSError as error:
        return error.strerror or str(error)
    return ""
