"""What a step sees: samples by number, for ever, each a window of `length` tokens from one source of the mixture.

The number of a sample alone, with the seed, decides what it is: which source, which window of it, which noise. Nothing is
drawn one after another, so there is no state to save, any number of ranks sees the same samples, and a resumed run goes on
with the next number. Every thousand samples hold each source exactly as often as its weight says.

Documents stand packed one after another, and a token's label is the next token of its document; a document's last token has
none. Labels are made before the window is cut for ranks, and a window's last token has the label that stands behind it. The
rest of a document that a window cuts is to the model a document of its own: positions start at 0 again.

A rank gives the positions it owns and gets only their tokens. Document ids go to all, since every mask needs all of them.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.config import schema
from ringspan.trainer.config.mixture import BLOCK, shares
from ringspan.trainer.data.corpus import NO_LABEL, TokenStream, open_source
from ringspan.trainer.data.synthetic_tasks import Answers, Packed, Passkey, Recall
from ringspan.trainer.data.tokenizer import Tokenizer


class Batch(NamedTuple):
    tokens: Tensor  # int64 (B, n), of the positions that were asked for, as labels and positions
    labels: Tensor
    positions: Tensor  # within their documents
    documents: Tensor  # int32 (B, S), of the whole windows, on the CPU
    seeds: Tensor  # int64 (B,): what dropout depends on
    sources: list[int]  # one a row: where in Dataset.names
    samples: list[int]

    def to(self, device: torch.device | str) -> "Batch":
        """The documents stay where they are: masks are planned on the CPU."""
        moved = (_send(x, torch.device(device)) for x in (self.tokens, self.labels, self.positions))
        return Batch(*moved, self.documents, _send(self.seeds, torch.device(device)), self.sources, self.samples)

    @property
    def lengths(self) -> list[int]:
        """Of all documents, or their parts, in these windows."""
        return [n for row in self.documents for n in torch.unique_consecutive(row, return_counts=True)[1].tolist()]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the model's forward takes, in that order."""
        return self.tokens, self.labels, self.positions, self.documents, self.seeds


class Window(NamedTuple):
    """Some positions of a window: their tokens and labels; and the lengths of all its documents."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray


class Corpus:
    """Windows of a stream. Each epoch cuts it at another offset, and takes the windows in another order."""

    def __init__(self, stream: TokenStream, length: int, seed: int) -> None:
        self.stream, self.length, self.seed = stream, length, seed
        self.num_windows = max(1, len(stream) // length)

    def window(self, number: int, at: np.ndarray) -> Window:
        epoch, index = divmod(number, self.num_windows)
        offset = hashed(self.seed, "offset", epoch) % len(self.stream)
        start = offset + permute(index, self.num_windows, self.seed, epoch) * self.length
        tokens, labels = self.stream.read(start + at), self.stream.read(start + at + 1)
        labels[self.stream.is_end(start + at)] = NO_LABEL
        return Window(tokens, labels, self.stream.lengths(start, self.length))


class Synthetic:
    def __init__(self, task: Recall | Passkey, seed: int) -> None:
        self.task, self.seed = task, seed

    def window(self, number: int, at: np.ndarray) -> Window:
        tokens, labels, lengths, _ = self._sequence(number)
        return Window(tokens[at], labels[at], lengths)

    def answers(self, number: int) -> Answers:
        return self._sequence(number).answers

    def _sequence(self, number: int) -> Packed:
        return self.task.sequence(np.random.default_rng(hashed(self.seed, "synthetic", number)))


class Dataset:
    """`part` is "train" or "held_out": text that the other never sees, synthetic samples that the other never draws."""

    def __init__(self, options: schema.Data, tokenizer: Tokenizer, seed: int, part: str = "train", vocabulary: int = 0) -> None:
        """`vocabulary` is the model's, which shards of tokens may use up; by default the tokenizer's."""
        assert part in ("train", "held_out")
        if not options.sources:
            raise ValueError("data.sources is empty: choose a mixture, such as data=mix, or name a source")
        self.length, self.seed, self.names = options.length, seed, list(options.sources)
        self.sources = [self._open(name, options, tokenizer, part, vocabulary or tokenizer.size) for name in self.names]
        self.shares = shares({name: source.weight for name, source in options.sources.items()})

    def _open(self, name: str, options: schema.Data, tokenizer: Tokenizer, part: str, vocabulary: int) -> Corpus | Synthetic:
        source = options.sources[name]
        seed = hashed(self.seed if part == "train" else 0, part, name)  # every run holds out the same
        try:
            if source.kind == "recall":
                return Synthetic(
                    Recall(tokenizer, self.length, source.keys, source.values, source.facts, source.questions), seed
                )
            if source.kind == "passkey":
                return Synthetic(Passkey(tokenizer, self.length, source.digits), seed)
            stream = open_source(source, tokenizer, vocabulary, options.cache)
            return Corpus(stream.part(part == "held_out", options.held_out), self.length, seed)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.sources.{name}: {error}") from None

    def place(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and which of its windows."""
        block, index = divmod(sample, BLOCK)
        index = permute(index, BLOCK, self.seed, f"mixture {block}")
        for source, share in enumerate(self.shares):
            if index < share:
                return source, block * share + index
            index -= share
        raise AssertionError("shares sum to BLOCK")

    def batch(self, samples: Sequence[int], at: Tensor | None = None) -> Batch:
        """These samples, at the positions that a rank owns; all positions without `at`, nothing at those ≥ length."""
        return self.windows([self.place(sample) for sample in samples], at, samples)

    def windows(self, places: Sequence[tuple[int, int]], at: Tensor | None = None, samples: Sequence[int] = ()) -> Batch:
        """Windows by (source, number), for evaluation."""
        where = np.arange(self.length) if at is None else at.cpu().numpy()
        inside = where < self.length
        read = where[inside]
        shape = len(places), len(where)
        tokens, labels, positions = np.zeros(shape, np.int64), np.full(shape, NO_LABEL), np.zeros(shape, np.int64)
        documents = np.empty((len(places), self.length), np.int32)
        for row, (source, number) in enumerate(places):
            window = self.sources[source].window(number, read)
            tokens[row, inside], labels[row, inside] = window.tokens, window.labels
            documents[row] = np.repeat(np.arange(len(window.lengths), dtype=np.int32), window.lengths)
            starts = np.cumsum(window.lengths) - window.lengths
            positions[row, inside] = read - starts[documents[row, read]]
        seeds = [hashed(self.seed, "dropout", sample) for sample in samples or range(len(places))]
        tensors = (torch.from_numpy(x) for x in (tokens, labels, positions, documents))
        return Batch(*tensors, torch.tensor(seeds), [source for source, _ in places], list(samples))


def samples_of(step: int, micro: int, options: schema.Data, data_rank: int, data_size: int) -> list[int]:
    """The samples that a data rank runs in one of a step's micro-batches. A step has the same ones at any data_size."""
    share, rest = divmod(options.batch, data_size)
    if rest or share % options.micro_batch:
        raise ValueError(
            f"data.batch={options.batch}, data.micro_batch={options.micro_batch}: a step's sequences must divide into "
            f"micro-batches on each of {data_size} data ranks"
        )
    first = step * options.batch + data_rank * share + micro * options.micro_batch
    return list(range(first, first + options.micro_batch))


def prefetch(make: Callable[[int], Batch], first: int, depth: int) -> Iterator[Batch]:
    """make(first), make(first + 1), … for ever, a thread being `depth` ahead.

    A thread and not a process: signals go to the main thread alone, so SIGTERM never stops the data of a step that is still
    to be finished; and reading a memory map leaves the interpreter to others.
    """
    if depth == 0:
        while True:
            yield make(first)
            first += 1
    ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def offer(item: Batch | BaseException) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                pass

    def work() -> None:
        number = first
        while not stop.is_set():
            try:
                offer(make(number))
            except BaseException as error:
                return offer(error)  # raised where the batch is missed
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


def permute(index: int, num: int, *key: object) -> int:
    """Where a permutation of 0 … num - 1 takes an index, without the table: a Feistel network of four rounds, walked on
    until it is inside. The table of a corpus of a billion windows would be eight gigabytes."""
    half = max(1, ((num - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(4):
            left, right = right, left ^ (hashed(*key, turn, right) & low)
        index = left << half | right
        if index < num:
            return index


def hashed(*key: object) -> int:
    """63 bits that anything printable decides, on every machine alike."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()) >> 1


def _send(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would wait for the GPU
