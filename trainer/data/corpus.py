"""Text on disk as one long stream of tokens, in which an end token closes each document, and one may begin it.

`text` and `stdlib` are tokenized once into a file of the cache, `tokens` are shards that somebody else made. Both are memory
mapped, so a rank reads only the tokens it asks for; where documents end is an index beside them. Documents stand in the order
of their contents' hash, each text once: an order that no machine and no file name decides. The last of them are held out.

The stream is a ring: a window that begins near its end goes on at its start. So windows need no padding, and each epoch can
cut the same documents at other places.
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
from typing import IO

import numpy as np

from ringspan.trainer.config.schema import Source
from ringspan.trainer.data.tokenizer import Tokenizer

MAX_HELD_OUT = 2**24  # tokens; more would tell nothing more
NO_LABEL = -100
BATCH = 2**22  # bytes of text that are tokenized at once


class TokenStream:
    """The tokens first … last - 1 of some shards; `ends` are the positions of documents' last tokens."""

    def __init__(self, shards: Sequence[np.ndarray], ends: np.ndarray, first: int = 0, last: int | None = None) -> None:
        self.shards, self.ends, self.first = shards, ends, first
        self.begins = np.cumsum([0, *(len(shard) for shard in shards)])
        self.last = int(self.begins[-1]) if last is None else last

    def __len__(self) -> int:
        return self.last - self.first

    def part(self, held_out: bool, share: float) -> "TokenStream":
        """The stream without what is held out, or that alone: the cut is at a document's end if there is one nearby."""
        num = max(min(int(len(self) * share), MAX_HELD_OUT), 2)
        cut = self.last - num
        at = int(np.searchsorted(self.ends, cut))
        near = [int(end) + 1 for end in self.ends[max(at - 1, 0) : at + 1]]
        cut = min((end for end in near if abs(end - cut) <= num // 2), key=lambda end: abs(end - cut), default=cut)
        if cut < self.first + 2:
            raise ValueError(f"data.held_out={share} leaves nothing of {len(self)} tokens to train on: give more text")
        return (
            TokenStream(self.shards, self.ends, cut, self.last)
            if held_out
            else TokenStream(self.shards, self.ends, self.first, cut)
        )

    def read(self, at: np.ndarray) -> np.ndarray:
        """The tokens (int64) at positions that may go round."""
        where = self.first + at % len(self)
        if len(self.shards) == 1:
            return self.shards[0][where].astype(np.int64)
        out = np.empty(len(at), np.int64)
        shard = np.searchsorted(self.begins, where, side="right") - 1
        for i in np.unique(shard):
            here = shard == i
            out[here] = self.shards[i][where[here] - self.begins[i]]
        return out

    def lengths(self, start: int, length: int) -> np.ndarray:
        """How long the documents, or their parts, are that a window consists of."""
        found = []
        for turn in range(start // len(self), (start + length - 1) // len(self) + 1):
            shift = turn * len(self) - self.first
            lo, hi = max(start, turn * len(self)), min(start + length, (turn + 1) * len(self))
            a, b = np.searchsorted(self.ends, [lo - shift, hi - shift])
            found += [np.asarray(self.ends[a:b]) + shift, [hi - 1]]  # a turn's end, and the window's, close what is open
        return np.diff(np.unique(np.concatenate(found)) - start, prepend=-1)

    def is_end(self, at: np.ndarray) -> np.ndarray:
        where = self.first + at % len(self)
        found = np.searchsorted(self.ends, where)
        hit = np.zeros(len(at), bool)
        inside = found < len(self.ends)
        hit[inside] = self.ends[found[inside]] == where[inside]
        return hit | (where == self.last - 1)


def text_files(paths: Sequence[str]) -> list[Path]:
    """Files, folders (all that they hold, hidden files and binaries aside) and glob patterns, each file once."""
    found: dict[Path, None] = {}
    for path in paths:
        name = os.path.expanduser(path)
        if os.path.isdir(name):
            inside = (Path(folder) / file for folder, _, files in os.walk(name) for file in files)
            files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(name).parts)]
        else:
            files = [Path(name)] if os.path.isfile(name) else [Path(p) for p in glob.glob(name, recursive=True)]
        files = [p for p in files if p.is_file()]
        if not files:
            raise ValueError(f"paths: {path!r} names no file; give files, folders or glob patterns such as 'docs/**/*.md'")
        found.update(dict.fromkeys(sorted(files)))
    return list(found)


@functools.cache
def stdlib_files() -> list[Path]:
    """The sources of Python's own library, without its tests and what was installed beside it."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for folder, inside, files in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = set(inside) - skip  # not even looked into: what is installed can be twenty times as much
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def open_source(source: Source, tokenizer: Tokenizer, vocabulary: int, cache: str) -> TokenStream:
    if source.kind == "tokens":
        return _token_shards(source, vocabulary, cache)
    if source.kind == "text" and not source.paths:
        raise ValueError("paths is empty: a source of kind text needs files, folders or glob patterns")
    files = stdlib_files() if source.kind == "stdlib" else text_files(source.paths)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    folder = _cached(
        cache,
        ["text", tokenizer.fingerprint, source.text_key, _as_they_are(files)],
        lambda new: _tokenize(files, source, tokenizer, dtype, new),
    )
    return TokenStream([np.memmap(folder / "tokens.bin", dtype, "r")], np.load(folder / "ends.npy", mmap_mode="r"))


def _tokenize(files: Sequence[Path], source: Source, tokenizer: Tokenizer, dtype: np.dtype, folder: Path) -> None:
    # Twice through the text: once for each document's hash and place, once in the order of the hashes.
    places: dict[bytes, tuple[Path, int, int]] = {}
    for file in files:
        with _reading(file):
            for begin, size, text in _documents(file, source.text_key):
                places.setdefault(hashlib.blake2b(text, digest_size=16).digest(), (file, begin, size))
    if not places:
        raise ValueError(f"paths={list(source.paths)}: {len(files)} files without any text")
    begin, end = np.array(tokenizer.begin, dtype), np.array([tokenizer.end], dtype)
    ends, position = [], 0
    with (folder / "tokens.bin").open("wb") as out:
        for documents in _batches(places[digest] for digest in sorted(places)):
            texts = [_read(*place, source.text_key) for place in documents]
            for ids in tokenizer.encode(texts):
                out.write(np.concatenate([begin, ids.astype(dtype), end]).tobytes())
                position += len(begin) + len(ids) + 1
                ends.append(position - 1)
    np.save(folder / "ends.npy", np.asarray(ends, np.int64))


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """An error names the file, which the system's own does not once the file is open."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None


def _documents(file: Path, text_key: str) -> Iterator[tuple[int, int, bytes]]:
    """Where each document of a file is, and its text."""
    if file.suffix != ".jsonl":
        text = file.read_bytes()
        if text and b"\0" not in text[:8192]:
            yield 0, len(text), text
        return
    begin = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                text = _line(line, text_key, f"{file}:{number}")
                if text:
                    yield begin, len(line), text
            begin += len(line)


def _line(line: bytes, text_key: str, where: str) -> bytes:
    try:
        return json.loads(line)[text_key].encode(errors="replace")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{where} is no JSON object with text under {text_key!r}: set the source's text_key") from None


def _read(file: Path, begin: int, size: int, text_key: str) -> bytes:
    with _reading(file), file.open("rb") as data:
        data.seek(begin)
        text = data.read(size)
    return _line(text, text_key, str(file)) if file.suffix == ".jsonl" else text


def _batches(places: Iterator[tuple[Path, int, int]]) -> Iterator[list[tuple[Path, int, int]]]:
    batch: list[tuple[Path, int, int]] = []
    total = 0
    for place in places:
        batch.append(place)
        total += place[2]
        if total >= BATCH or len(batch) == 1024:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _token_shards(source: Source, vocabulary: int, cache: str) -> TokenStream:
    if not source.paths:
        raise ValueError("paths is empty: a source of kind tokens needs shards, such as 'data/*.bin'")
    files, dtype = text_files(source.paths), np.dtype(source.dtype)
    shards = []
    for file in files:
        size = file.stat().st_size - source.header
        if size < 1 or size % dtype.itemsize:
            raise ValueError(f"{file} has {size} bytes behind its header of {source.header}: no number of {dtype} tokens")
        shards.append(np.memmap(file, dtype, "r", offset=source.header))
    begins = np.cumsum([0, *(len(shard) for shard in shards)])

    def index(folder: Path) -> None:
        step, found, most = 2**24, [np.zeros(0, np.int64)], 0
        for shard, begin in zip(shards, begins, strict=False):
            for at in range(0, len(shard), step):
                piece = shard[at : at + step]
                most = max(most, int(piece.max()))
                if source.end_token >= 0:
                    found.append(np.flatnonzero(piece == source.end_token) + begin + at)
        if most >= vocabulary:
            raise ValueError(
                f"the shards hold the id {most}, but the vocabulary has {vocabulary}: give model.vocabulary or the tokenizer "
                "that made them, and the right dtype and header"
            )
        np.save(folder / "ends.npy", np.concatenate(found))

    folder = _cached(cache, ["tokens", source.dtype, source.header, source.end_token, vocabulary, _as_they_are(files)], index)
    return TokenStream(shards, np.load(folder / "ends.npy", mmap_mode="r"))


def _as_they_are(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """What tells that a file is another one now; there may be thousands, and every rank of every start looks."""
    found = [(os.path.abspath(file), os.stat(file)) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]


def _cached(cache: str, key: list, make: Callable[[Path], None]) -> Path:
    """The folder of this key; of all processes on this machine one makes it, and the others wait."""
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    try:
        return _made(Path(cache).expanduser(), name, make)
    except OSError as error:
        raise ValueError(f"data.cache={cache!r} is no folder that can be written to: {error}; give another one") from None


def _made(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        problem = _wait_for(lock)
        if (root / name).exists():
            return root / name
        if problem:
            print(f"{root}: this file system has no locks ({problem}), so every process tokenizes for itself", flush=True)
        else:
            for left in root.glob(f"{name}.[0-9]*"):  # by a process that was killed; it may have had this one's number
                shutil.rmtree(left)
        new = root / f"{name}.{os.getpid()}-{platform.node()}"
        new.mkdir(exist_ok=True)
        try:
            make(new)
            new.rename(root / name)
        except OSError:
            if not (root / name).exists():  # by a process that was sooner, where there are no locks
                raise
        finally:
            if new.exists():
                for file in new.iterdir():
                    file.unlink()
                new.rmdir()
    return root / name


def _wait_for(lock: IO[str]) -> str:
    """Until no other process has it; or why nobody can."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when its process dies
    except OSError as error:
        return error.strerror or str(error)
    return ""
