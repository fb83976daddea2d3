"""Random damage to the files that the data code reads: a valid result or one message, and never another exception."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ringspan.trainer.config.schema import Source
from ringspan.trainer.data import corpus
from ringspan.trainer.data.corpus import TokenStream
from tests.trainer.data.helpers import BYTES


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip a bit, cut, swap two ranges, or insert bytes."""
    at, other = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    kind = draw.randrange(4)
    if kind == 0 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + data[other:] * draw.randrange(2)
    if kind == 2:
        return data[other:] + data[at:other] + data[:at]
    insert = draw.choice([b"[" * 50_000, b"\0" * 7, b"\xff" * 8, b'"', b"NaN", b"9" * 400, b"\n{}\n", draw.randbytes(99)])
    return data[:at] + insert + data[at:]


def text(folder: Path) -> Source:
    (folder / "a.jsonl").write_text("\n".join('{"text": "document %d", "n": [1, {}]}' % i for i in range(30)))  # noqa: UP031
    (folder / "b.txt").write_text("a plain text, öäü " * 9)
    return Source("text", paths=[str(folder / "*.jsonl"), str(folder / "b.txt")])


def shards(folder: Path) -> Source:
    for name in "xy":
        np.arange(500, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return Source("tokens", paths=[str(folder / "*.bin")], end_token=7, header=16)


def open_and_read(source: Source, cache: Path) -> tuple[TokenStream, bytes]:
    stream = corpus.open_source(source, BYTES, 512, str(cache))
    return stream, stream.read(np.arange(len(stream))).tobytes() + np.asarray(stream.ends).tobytes()


def mutate_files(tmp_path: Path, make: Callable[[Path], Source], number: int, seed: int) -> None:
    """Mutate inputs and files of the cache; a cache gives its content or is made again, an input is read or named."""
    draw, inputs, cache = random.Random(seed), tmp_path / "in", tmp_path / "cache"
    inputs.mkdir()
    source = make(inputs)
    stream, expected = open_and_read(source, cache)
    assert stream.cached is not None
    for _ in range(number):
        of_cache = draw.random() < 0.5
        path = draw.choice(sorted((stream.cached.path if of_cache else inputs).iterdir()))
        whole, times = path.read_bytes(), os.stat(path)
        path.write_bytes(mutate(whole, draw))
        if draw.random() < 0.5:  # as on a disk that decays; a write would change the time
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        try:
            _, found = open_and_read(source, cache)
            assert not of_cache or found == expected, path
        except ValueError as error:
            assert not of_cache and any(word in str(error) for word in (str(inputs), "vocabulary", "without any text")), error
        if not of_cache:
            path.write_bytes(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert open_and_read(source, cache)[1] == expected, path


@pytest.mark.parametrize("make", [text, shards])
def test_a_sample_of_mutations_of_data_files(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    mutate_files(tmp_path, make, 40, seed=0)


@pytest.mark.faults
@pytest.mark.parametrize("make", [text, shards])
def test_many_mutations_of_data_files(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    mutate_files(tmp_path, make, 1000, seed=1)
