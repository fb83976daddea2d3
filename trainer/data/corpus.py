"""Text on disk as one stream of tokens: an end token closes each document, and a begin token may open it.

    open_source ─ text, stdlib: tokenized once into the cache folder ─┐
                ─ tokens: shards tokenized by another program ────────┴→ TokenStream → Corpus of dataset.py

A rank reads only the tokens it asks for; an index holds the positions of the document ends. Documents are ordered by the hash
of their contents, and equal texts count once, so the order depends neither on the machine nor on file names. The last documents
are held out.

The stream is circular: a window near its end continues at its start. Windows therefore need no padding, and each epoch can cut
the same documents at other positions.
"""

import contextlib
import functools
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ringspan.trainer.config.schema import Source
from ringspan.trainer.data.cache import PAGE, Builder, CachedFolder, Damaged, PageSums, open_cached
from ringspan.trainer.data.token_file import TokenFile
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.monitoring.check_timer import check_timer

MAX_HELD_OUT = 2**24  # tokens; more would not make the held-out loss more precise
NO_LABEL = -100
BATCH = 2**22  # bytes of text per call of the tokenizer


class TokenStream:
    """A circular stream over the tokens first … last − 1 of some shards.

    Args:
        shards: token ids, arrays of shape (n,) or files.
        ends: sorted positions, in the concatenated shards, of the last token of each document.
        first, last: range of the stream; all tokens by default.
        vocabulary: exclusive bound of the ids; 0: not checked.
        cached: checksums, whose first files are the shards.
        held_out_from: position of the first held-out token, at a document's beginning; None: `subset` chooses it.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray | TokenFile],
        ends: np.ndarray,
        first: int = 0,
        last: int | None = None,
        vocabulary: int = 0,
        cached: CachedFolder | None = None,
        held_out_from: int | None = None,
    ) -> None:
        self.shards, self.ends, self.first, self.held_out_from = shards, ends, first, held_out_from
        self.vocabulary, self.cached = vocabulary, cached
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
        cut = cut if self.held_out_from is None else self.held_out_from
        if cut < self.first + 2:
            raise ValueError(f"data.held_out={share} leaves nothing of {len(self)} tokens to train on; add text")
        first, last = (cut, self.last) if held_out else (self.first, cut)
        return TokenStream(self.shards, self.ends, first, last, self.vocabulary, self.cached)

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens, int64 (n,), at positions (n,); positions past the end wrap around.

        Raises:
            Damaged: a file was cut short, or has ids beyond the vocabulary, since it was opened.
        """
        out = np.empty(len(positions), np.int64)
        for number, rows, indices in self._by_shard(positions):
            shard = self.shards[number]
            out[rows] = shard[indices]
            with check_timer("shards"):
                if self.vocabulary and len(indices) and (largest := out[rows].max()) >= self.vocabulary:
                    raise Damaged(
                        f"{_file_of(shard)} has the id {largest}, but the vocabulary has {self.vocabulary}: "
                        "the file has changed since it was opened"
                    )
        return out

    def files(self, positions: np.ndarray) -> list[str]:
        """Return the files that hold the tokens at positions (n,)."""
        return [_file_of(self.shards[number]) for number, _, _ in self._by_shard(positions)]

    def verify(self, positions: np.ndarray) -> None:
        """Compare the pages that hold the tokens at positions (n,) with their checksums; raise Damaged if one has changed."""
        if self.cached is None:
            return
        for number, _, indices in self._by_shard(positions):
            self.cached.verify_pages(number, np.unique(indices * self.shards[number].dtype.itemsize // PAGE))

    def _by_shard(self, positions: np.ndarray) -> Iterator[tuple[int, slice | np.ndarray, np.ndarray]]:
        """Yield (number of a shard, its rows of `positions`, their indices in the shard)."""
        indices = self.first + positions % len(self)
        if len(self.shards) == 1:
            yield 0, slice(None), indices
            return
        shard = np.searchsorted(self.begins, indices, side="right") - 1
        for number in np.unique(shard):
            rows = shard == number
            yield int(number), rows, indices[rows] - self.begins[number]

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
            files = [Path(name)] if os.path.isfile(name) else [Path(p) for p in _glob(name)]
        files = [p for p in files if p.is_file()]
        if not files:
            raise ValueError(f"paths: {path!r} matches no file; give files, folders or glob patterns such as 'docs/**/*.md'")
        result.update(dict.fromkeys(sorted(files)))
    return list(result)


def _glob(pattern: str) -> Iterator[str]:
    """Expand a glob pattern. `**` enters each folder once; Python's glob does not end in a cycle of links."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    index = parts.index("**")
    base, rest = os.sep.join(parts[:index]), parts[index + 1 :] or ["*"]
    tops = glob.glob(base) if index > 1 or base else [os.sep if index else os.curdir]
    for top in tops:
        seen: set[tuple[int, int]] = set()
        for folder, subfolders, _ in os.walk(top, followlinks=True):
            stat = os.stat(folder)
            if (stat.st_dev, stat.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((stat.st_dev, stat.st_ino))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            yield from _glob(os.path.join(glob.escape(folder), *rest))


@functools.cache
def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library, without its tests and without installed packages."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    result = []
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - skip  # os.walk does not enter them: installed packages can be 20 times as many files
        result += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(result)


def open_source(source: Source, tokenizer: Tokenizer, vocabulary: int, cache: str, full: bool = False) -> TokenStream:
    """Open a source of kind text, stdlib or tokens as a stream of tokens. Tokenize text if the cache does not have it.

    Args:
        source: options of the source.
        tokenizer: the run's tokenizer; kind tokens does not use it.
        vocabulary: exclusive bound of the ids in token shards.
        cache: the cache folder.
        full: verify every page of tokens, instead of a sample.
    Raises:
        ValueError: a path matches nothing, a file cannot be read, or a shard contradicts its options.
    """
    if source.kind == "tokens":
        return _token_shards(source, vocabulary, cache, full)
    if source.kind == "text" and not source.paths:
        raise ValueError("paths is empty: a source of kind text needs files, folders or glob patterns")
    files = stdlib_files() if source.kind == "stdlib" else text_files(source.paths)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    folder = open_cached(
        cache,
        ["text", tokenizer.fingerprint, source.text_key, file_signatures(files)],
        lambda new: _tokenize(files, source, tokenizer, dtype, new),
        full,
    )
    tokens = TokenFile(folder.path / "tokens.bin", dtype)
    return TokenStream([tokens], np.load(folder.path / "ends.npy", mmap_mode="r"), vocabulary=tokenizer.size, cached=folder)


def _tokenize(files: Sequence[Path], source: Source, tokenizer: Tokenizer, dtype: np.dtype, new: Builder) -> None:
    """Write tokens.bin and ends.npy in two passes: hash and locate every document, then tokenize in the order of the hashes."""
    locations: dict[bytes, tuple[Path, int, int]] = {}
    for file in files:
        with naming(file):
            total, num_bytes = hashlib.blake2b(digest_size=16), 0
            for begin, size, text in _documents(file, source.text_key):
                digest = hashlib.blake2b(text, digest_size=16).digest()
                total.update(digest)
                num_bytes += size
                locations.setdefault(digest, (file, begin, size))
            new.inputs.append((os.path.abspath(file), num_bytes, total.hexdigest()))
    if not locations:
        raise ValueError(f"paths={list(source.paths)}: {len(files)} files without any text")
    begin_ids, end_ids = np.array(tokenizer.begin, dtype), np.array([tokenizer.end], dtype)
    ends, position = [], 0
    with new.open("tokens.bin") as out:
        for batch in _batches(locations[digest] for digest in sorted(locations)):
            texts = [_read(*location, source.text_key) for location in batch]
            for ids in tokenizer.encode(texts):
                out.write(np.concatenate([begin_ids, ids.astype(dtype), end_ids]).tobytes())
                position += len(begin_ids) + len(ids) + 1
                ends.append(position - 1)
    with new.open("ends.npy") as out:
        np.save(out, np.asarray(ends, np.int64))


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{location} is no JSON object with text under {text_key!r}: set the source's text_key") from None


def _read(file: Path, begin: int, size: int, text_key: str) -> bytes:
    with naming(file), file.open("rb") as data:
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


def _token_shards(source: Source, vocabulary: int, cache: str, full: bool) -> TokenStream:
    if not source.paths:
        raise ValueError("paths is empty: a source of kind tokens needs shards, such as 'data/*.bin'")
    files, dtype = text_files(source.paths), np.dtype(source.dtype)
    shards: list[TokenFile] = []
    for file in files:
        size = file.stat().st_size - source.header
        if size < 1 or size % dtype.itemsize:
            raise ValueError(f"{file} has {size} bytes after its header of {source.header}: no number of {dtype} tokens")
        shards.append(TokenFile(file, dtype, source.header))
    begins = np.cumsum([0, *(len(shard) for shard in shards)])

    def index(new: Builder) -> None:
        chunk, ends, largest = 2**24, [np.zeros(0, np.int64)], 0
        for file, shard, begin in zip(files, shards, begins, strict=False):
            sums = PageSums()
            for offset in range(0, len(shard), chunk):
                ids = shard[offset : offset + chunk]
                sums.add(ids)
                largest = max(largest, int(ids.max()))
                if source.end_token >= 0:
                    ends.append(np.flatnonzero(ids == source.end_token) + begin + offset)
            new.add(os.path.abspath(file), sums, source.header)
        if largest >= vocabulary:
            raise ValueError(
                f"the shards hold the id {largest}, but the vocabulary has {vocabulary}: set model.vocabulary or the tokenizer "
                "that made them, and the right dtype and header"
            )
        with new.open("ends.npy") as out:
            np.save(out, np.concatenate(ends))

    key = ["tokens", source.dtype, source.header, source.end_token, vocabulary, file_signatures(files)]
    folder = open_cached(cache, key, index, full)
    return TokenStream(shards, np.load(folder.path / "ends.npy", mmap_mode="r"), vocabulary=vocabulary, cached=folder)


def file_signatures(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file: cheap enough for every rank of every start and thousands of files."""
    stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _file_of(shard: np.ndarray | TokenFile) -> str:
    return str(shard.path) if isinstance(shard, TokenFile) else "an array"
