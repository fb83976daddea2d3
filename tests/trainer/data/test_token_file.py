"""Token ids in a file: any indices, and a file that is cut short, also while it is read."""

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ringspan.trainer.data.cache import Damaged
from ringspan.trainer.data.token_file import MAX_GAP, TokenFile

IDS = np.random.default_rng(0).integers(0, 2**16, 6 * MAX_GAP).astype(np.uint16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "shard.bin").write_bytes(b"H" * 10 + IDS.tobytes())
    return tmp_path / "shard.bin"


@pytest.mark.parametrize(
    "index",
    [
        slice(5, 9),
        slice(len(IDS) - 2, len(IDS) + 9),
        np.arange(7),
        np.arange(len(IDS)),
        np.arange(3, len(IDS), MAX_GAP + 1),  # each read by itself
        np.arange(4, len(IDS), MAX_GAP),
        np.concatenate([np.arange(len(IDS) - 4, len(IDS)), np.arange(3)]),  # the end and the beginning
        np.array([9, 9, 8, 8, 10]),
        np.array([], np.int64),
    ],
    ids=str,
)
def test_indices_give_the_ids_of_an_array(path: Path, index: slice | np.ndarray) -> None:
    tokens = TokenFile(path, np.dtype(np.uint16), header=10)
    assert len(tokens) == len(IDS) and tokens[index].dtype == np.uint16
    np.testing.assert_array_equal(tokens[index], IDS[index])


def test_reads_that_return_less_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: read(file, [views[0][:1000]], offset))
    np.testing.assert_array_equal(TokenFile(path, np.dtype(np.uint16), header=10)[np.arange(5000)], IDS[:5000])


def test_a_read_that_fails_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tokens = TokenFile(path, np.dtype(np.uint16), header=10)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(Damaged, match=rf"{path} cannot be read: Input/output error"):
        tokens[:3]


def test_offsets_beyond_2_31_bytes(tmp_path: Path) -> None:
    begin = 2**31
    with (tmp_path / "large.bin").open("wb") as file:  # sparse
        file.seek(4 * begin)
        file.write(np.arange(9, dtype=np.uint32).tobytes())
    tokens = TokenFile(tmp_path / "large.bin", np.dtype(np.uint32))
    assert len(tokens) == begin + 9 and tokens[np.array([begin - 1, begin + 3, begin + 8])].tolist() == [0, 3, 8]


def test_a_file_that_was_cut_is_named(path: Path) -> None:
    tokens = TokenFile(path, np.dtype(np.uint16), header=10)
    os.truncate(path, 10 + 2 * 100)
    np.testing.assert_array_equal(tokens[np.arange(100)], IDS[:100])
    with pytest.raises(Damaged, match=rf"{path} has 210 bytes, not {10 + IDS.nbytes}: it was cut short"):
        tokens[np.arange(99, 101)]


def test_a_file_cut_while_it_is_read_ends_no_process(path: Path) -> None:
    """A read of a memory map would end with SIGBUS here."""
    tokens, whole, stop = TokenFile(path, np.dtype(np.uint16), header=10), path.read_bytes(), threading.Event()

    def cut() -> None:
        while not stop.is_set():
            os.truncate(path, 20)
            path.write_bytes(whole)

    thread = threading.Thread(target=cut)
    thread.start()
    outcomes, end = set(), time.monotonic() + 20
    try:
        while outcomes != {"whole", "cut"} and time.monotonic() < end:
            try:
                np.testing.assert_array_equal(tokens[np.arange(len(IDS))], IDS)
                outcomes.add("whole")
            except Damaged:
                outcomes.add("cut")
    finally:
        stop.set()
        thread.join()
    assert outcomes == {"whole", "cut"}
