"""Prefetching: order, errors, signals, and the end of threads and processes."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from ringspan.trainer.config.schema import Source
from ringspan.trainer.data import train_tokenizer
from ringspan.trainer.data.dataset import Dataset
from ringspan.trainer.data.prefetch import prefetch
from ringspan.trainer.data.tokenizer import HuggingFace
from tests.trainer.data.helpers import BYTES, data_options


def test_prefetch_keeps_order_raises_errors_and_ends() -> None:
    made = []

    def make(number: int) -> int:
        if number == 7:
            raise RuntimeError("seven")
        made.append(number)
        return number

    prefetched = prefetch(make, 3, depth=2)
    assert next(prefetched) == 3
    time.sleep(0.3)
    assert made == [3, 4, 5, 6]  # one consumed, two in the queue, one waiting for space
    assert [next(prefetched), next(prefetched), next(prefetched)] == [4, 5, 6]
    with pytest.raises(RuntimeError, match=r"seven"):
        next(prefetched)
    without_thread = prefetch(make, 0, depth=0)
    assert [next(without_thread) for _ in range(3)] == [0, 1, 2]
    abandoned = prefetch(lambda n: n, 0, depth=1)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_workers_make_the_same_items_in_order_and_end(tmp_path: Path) -> None:
    dataset = Dataset(data_options(tmp_path, 256, {"x": Source(kind="recall")}), BYTES, seed=0)
    prefetched = prefetch(lambda n: (os.getpid(), dataset.batch([n, n + 1])), 5, depth=2, workers=2)
    pids = set()
    for number in range(5, 12):
        pid, batch = next(prefetched)
        pids.add(pid)
        for found, expected in zip(batch, dataset.batch([number, number + 1]), strict=True):
            assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    assert len(pids) == 2 and os.getpid() not in pids
    for pid in pids:  # a scheduler sends SIGTERM to every process of a job
        os.kill(pid, signal.SIGTERM)
    assert next(prefetched)[1].samples == [12, 13]
    prefetched.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.05)


def test_an_error_of_a_worker_is_raised() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    prefetched = prefetch(make, 0, depth=2, workers=2)
    assert [next(prefetched), next(prefetched)] == [0, 1]
    with pytest.raises(ValueError, match=r"two"):
        next(prefetched)
    assert not multiprocessing.active_children()


def test_prefetch_survives_sigterm() -> None:
    received = []
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        prefetched = prefetch(lambda n: n, 0, depth=1)
        assert next(prefetched) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert [next(prefetched) for _ in range(5)] == [1, 2, 3, 4, 5] and received
        prefetched.close()  # type: ignore[attr-defined]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_workers_encode_with_a_tokenizer_that_was_told_to_use_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    (tmp_path / "a.txt").write_text("some words and more words " * 50)
    train_tokenizer.train([tmp_path / "a.txt"], 300).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json", "", "")
    texts = [b"some words and more words " * 20] * 64

    def make(number: int) -> int:
        return sum(len(ids) for ids in tokenizer.encode(texts))

    expected = make(0)  # starts the threads, which a fork lacks
    prefetched = prefetch(make, 0, depth=2, workers=2)

    def fail(number: int, frame: object) -> None:
        raise TimeoutError("a worker waits for the tokenizer's threads")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(40)
    try:
        assert next(prefetched) == expected
        prefetched.close()  # type: ignore[attr-defined]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for process in multiprocessing.active_children():
            process.kill()  # one that waits would not end
