"""Prefetching of batches, by a thread or by worker processes."""

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


def prefetch(make: Callable[[int], T], first: int, depth: int, workers: int = 0) -> Iterator[T]:
    """Yield make(first), make(first + 1), … without end; a thread prefetches `depth` items (0: no thread).

    Reads of files release the GIL, so that a thread suffices for text. Drawn tasks take Python's time, also the training
    loop's: with `workers`, so many processes make the items.
    """
    if workers:
        options: Any = dict(num_workers=workers, prefetch_factor=-(-depth // workers), multiprocessing_context="fork")
        loader = DataLoader(
            _Items(make),
            batch_size=None,
            sampler=count(first),
            collate_fn=_unchanged,
            worker_init_fn=_prepare_worker,
            **options,
        )
        items = iter(loader)
        try:
            while True:
                yield next(items)
        except Exception as error:
            raise error.with_traceback(None) from None  # its frames would keep `items`, and thus the workers
        finally:
            del items  # ends the workers now: a garbage collection ends them only after their queues, which takes 10 s each
    if depth == 0:
        while True:
            yield make(first)
            first += 1
    ready: queue.Queue[T | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | BaseException) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                pass

    def work() -> None:
        number = first
        while not stop.is_set():
            try:
                put(make(number))
            except BaseException as error:
                return put(error)  # raised in the consumer
            number += 1

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


class _Items(Dataset[T]):
    """make(number) by number."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self.make = make

    def __getitem__(self, number: int) -> T:
        return self.make(number)


def _unchanged(item: T) -> T:
    return item


def _prepare_worker(worker: int) -> None:
    """A scheduler stops all processes of a job; the step in progress still needs its data. Workers end with their parent.

    A fork has no threads, and a tokenizer that was told to use them would wait for them forever.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
