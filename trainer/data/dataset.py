"""Samples by number, without end: each is a window of `length` tokens from one source of the mixture.

    sample number, seed → source and window number → tokens, labels, positions, document ids

The number and the seed alone determine a sample, so there is no state to save. Any number of ranks sees the same samples, and a
resumed run continues with the next number. Every block of 1000 samples holds each source exactly in proportion to its weight.

Documents are packed, one after another in the stream or by best fit (packing.py). The label of a token is the next token of its
document; the last token of a document has none. Labels are made before a window is sharded, and the label of its last token is
the token after the window. A document that a window cuts becomes two documents: positions restart at 0.

A rank passes the positions that it owns and gets only their tokens. Every rank gets all document ids, because masks need them.
Every rank also reads the same few tokens of each sample; their checksum shows whether the ranks of a ring read the same text.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.config import schema
from ringspan.trainer.config.mixture import BLOCK, shares
from ringspan.trainer.data import tokenizer as tokenizers
from ringspan.trainer.data.cache import Damaged
from ringspan.trainer.data.corpus import NO_LABEL, TokenStream, open_source
from ringspan.trainer.data.needles import Needles
from ringspan.trainer.data.packages import open_packages
from ringspan.trainer.data.packing import NO_TOKEN, best_fit
from ringspan.trainer.data.synthetic_tasks import Answers, Packed, Passkey, Recall
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.monitoring.check_timer import check_timer

MAX_DOCUMENTS = 16  # of a sequence of needles
PROBES = 8, 8  # every rank reads 8 ranges of 8 tokens of a sample: texts of which all 64 tokens agree are the same


class Batch(NamedTuple):
    """Windows of B samples, of S tokens each, at the n positions that a rank owns."""

    tokens: Tensor  # int64 (B, n)
    labels: Tensor  # int64 (B, n); NO_LABEL where there is none
    positions: Tensor  # int64 (B, n), within the documents
    documents: Tensor  # int32 (B, S), of the whole windows, on the CPU
    seeds: Tensor  # int64 (B,), for dropout
    sources: list[int]  # B indices into Dataset.names
    samples: list[int]  # B numbers
    checksums: list[int]  # B CRC-32 of document lengths and of the same tokens on every rank

    def to(self, device: torch.device | str) -> "Batch":
        """Copy to a device. The documents stay on the CPU, where masks are planned."""
        device = torch.device(device)
        return self._replace(
            tokens=_copy(self.tokens, device),
            labels=_copy(self.labels, device),
            positions=_copy(self.positions, device),
            seeds=_copy(self.seeds, device),
        )

    @property
    def lengths(self) -> list[int]:
        """Lengths of all documents, or parts of documents, in these windows."""
        return [n for row in self.documents for n in torch.unique_consecutive(row, return_counts=True)[1].tolist()]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of the model's forward, in order."""
        return self.tokens, self.labels, self.positions, self.documents, self.seeds


class Window(NamedTuple):
    """Tokens and labels at some positions of a window, and the lengths of all its documents."""

    tokens: np.ndarray  # int64 (n,)
    labels: np.ndarray  # int64 (n,)
    lengths: np.ndarray  # int64 (documents,)


class Corpus:
    """Windows of a stream. Each epoch cuts the stream at another offset and permutes the windows anew."""

    def __init__(self, stream: TokenStream, length: int, seed: int) -> None:
        self.stream, self.length, self.seed = stream, length, seed
        self.num_windows = max(1, len(stream) // length)

    def start(self, number: int) -> int:
        """Return the position in the stream at which a window begins."""
        epoch, index = divmod(number, self.num_windows)
        offset = stable_hash(self.seed, "offset", epoch) % len(self.stream)
        return offset + permute(index, self.num_windows, self.seed, epoch) * self.length

    def positions(self, number: int) -> np.ndarray:
        """Return the positions in the stream of a window's tokens."""
        return self.start(number) + np.arange(self.length)

    def window(self, number: int, positions: np.ndarray) -> Window:
        """Return a window by number, at positions (n,)."""
        start = self.start(number)
        tokens, labels = self.stream.read(start + positions), self.stream.read(start + positions + 1)
        labels[self.stream.is_end(start + positions)] = NO_LABEL
        return Window(tokens, labels, self.stream.lengths(start, self.length))


class PackedCorpus(Corpus):
    """Windows of whole documents as far as they fit. Each epoch permutes the same windows."""

    def __init__(self, stream: TokenStream, length: int, seed: int) -> None:
        super().__init__(stream, length, seed)
        self.bins = best_fit(stream.lengths(0, len(stream)), length)
        self.num_windows = len(self.bins)

    def positions(self, number: int) -> np.ndarray:
        positions, _ = self._bin(number)
        return positions[positions != NO_TOKEN]

    def window(self, number: int, positions: np.ndarray) -> Window:
        """Return a window by number, at positions (n,). Padding has token 0 and no label."""
        all_positions, lengths = self._bin(number)
        chosen = all_positions[positions]
        padding = chosen == NO_TOKEN
        tokens, labels = self.stream.read(chosen), self.stream.read(chosen + 1)
        labels[self.stream.is_end(chosen) | padding] = NO_LABEL
        tokens[padding] = 0
        return Window(tokens, labels, lengths)

    def _bin(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, index = divmod(number, self.num_windows)
        return self.bins.window(permute(index, self.num_windows, self.seed, epoch))


class Synthetic:
    """Windows of a synthetic task."""

    def __init__(self, task: Recall | Passkey | Needles, seed: int) -> None:
        self.task, self.seed = task, seed

    def window(self, number: int, positions: np.ndarray) -> Window:
        """Return a window by number, at positions (n,)."""
        tokens, labels, lengths, _ = self._sequence(number)
        return Window(tokens[positions], labels[positions], lengths)

    def answers(self, number: int) -> Answers:
        """Return the answers of a window by number."""
        return self._sequence(number).answers

    def _sequence(self, number: int) -> Packed:
        return self.task.sequence(np.random.default_rng(stable_hash(self.seed, "synthetic", number)))


class Dataset:
    """The mixture of all sources, by sample number.

    Args:
        options: options of the group data.
        tokenizer: the run's tokenizer.
        seed: the run's seed.
        part: "train" or "held_out". The parts share neither text nor synthetic samples.
        vocabulary: size of the model's vocabulary, the bound of ids in token shards; 0: that of the tokenizer.
        opened: whole streams by source, of the other part.
    Raises:
        ValueError: a source cannot be opened; the message names it.
    """

    def __init__(
        self,
        options: schema.Data,
        tokenizer: Tokenizer,
        seed: int,
        part: str = "train",
        vocabulary: int = 0,
        opened: Mapping[str, TokenStream] | None = None,
    ) -> None:
        self.opened = dict(opened or {})
        assert part in ("train", "held_out")
        if not options.sources:
            raise ValueError("data.sources is empty: choose a mixture, such as data=mix, or name a source")
        self.length, self.seed, self.names = options.length, seed, list(options.sources)
        self.sources = [self._open(name, options, tokenizer, part, vocabulary or tokenizer.size) for name in self.names]
        self.shares = shares({name: source.weight for name, source in options.sources.items()})

    def _open(self, name: str, options: schema.Data, tokenizer: Tokenizer, part: str, vocabulary: int) -> Corpus | Synthetic:
        source = options.sources[name]
        seed = stable_hash(self.seed if part == "train" else 0, part, name)  # held-out windows do not depend on the run's seed
        try:
            if source.kind == "recall":
                return Synthetic(
                    Recall(tokenizer, self.length, source.keys, source.values, source.facts, source.questions), seed
                )
            if source.kind == "passkey":
                return Synthetic(Passkey(tokenizer, self.length, source.digits), seed)
            if source.kind == "needles":
                shape = source.families, source.num_questions, source.digits
                held_out = part == "held_out"
                count, share = (1, 0.0) if held_out else (MAX_DOCUMENTS, source.random_words)
                return Synthetic(Needles(tokenizer, self.length, *shape, held_out, count, source.seen, share), seed)
            if name not in self.opened:
                full = options.verify == "full"
                self.opened[name] = (
                    open_packages(tokenizer, options.cache, full)
                    if source.kind == "packages"
                    else open_source(source, tokenizer, vocabulary, options.cache, full)
                )
            kind = PackedCorpus if options.packing == "best_fit" else Corpus
            return kind(self.opened[name].subset(part == "held_out", options.held_out), self.length, seed)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.sources.{name}: {error}") from None

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (source index, window number) of a sample."""
        block, index = divmod(sample, BLOCK)
        index = permute(index, BLOCK, self.seed, f"mixture {block}")
        for source, share in enumerate(self.shares):
            if index < share:
                return source, block * share + index
            index -= share
        raise AssertionError("shares sum to BLOCK")

    def origin(self, sample: int) -> str:
        """Return the source and the files of a sample, and the problem of a file that does not match its checksum."""
        index, number = self.locate(sample)
        source, text = self.sources[index], f"data.sources.{self.names[index]}"
        if not isinstance(source, Corpus):
            return text
        positions = source.positions(number)
        text += f", {', '.join(source.stream.files(positions))}"
        try:
            source.stream.verify(positions)
        except (Damaged, OSError) as error:
            text += f": {error}"
        return text

    def batch(self, samples: Sequence[int], owned: Tensor | None = None) -> Batch:
        """Return samples by number, at the window positions that a rank owns.

        Args:
            samples: B sample numbers.
            owned: positions, int64 (n,); all positions if None. Positions ≥ length are padding: token 0 without label.
        """
        return self.windows([self.locate(sample) for sample in samples], owned, samples)

    def windows(self, locations: Sequence[tuple[int, int]], owned: Tensor | None = None, samples: Sequence[int] = ()) -> Batch:
        """Return windows by (source index, window number), for evaluation; `owned` as in `batch`."""
        columns = np.arange(self.length) if owned is None else owned.cpu().numpy()
        inside = columns < self.length
        valid = columns[inside]
        shape = len(locations), len(columns)
        tokens, labels, positions = np.zeros(shape, np.int64), np.full(shape, NO_LABEL), np.zeros(shape, np.int64)
        documents = np.empty((len(locations), self.length), np.int32)
        checksums = []
        for row, (source, number) in enumerate(locations):
            probes = self._probes(source, number)
            window = self.sources[source].window(number, np.concatenate([valid, probes]))
            tokens[row, inside], labels[row, inside] = window.tokens[: len(valid)], window.labels[: len(valid)]
            with check_timer("samples"):
                checksums.append(zlib.crc32(window.tokens[len(valid) :].tobytes(), zlib.crc32(window.lengths.tobytes())))
            documents[row] = np.repeat(np.arange(len(window.lengths), dtype=np.int32), window.lengths)
            starts = np.cumsum(window.lengths) - window.lengths
            positions[row, inside] = valid - starts[documents[row, valid]]
        seeds = [stable_hash(self.seed, "dropout", sample) for sample in samples or range(len(locations))]
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(positions),
            torch.from_numpy(documents),
            torch.tensor(seeds),
            [source for source, _ in locations],
            list(samples),
            checksums,
        )

    def _probes(self, source: int, number: int) -> np.ndarray:
        """Positions of a window that every rank reads, (64,)."""
        ranges, width = PROBES
        first = stable_hash(self.seed, "probes", source, number) + np.arange(ranges)[:, None] * (self.length // ranges)
        return ((first + np.arange(width)) % self.length).ravel()


def open_parts(config: schema.Config) -> tuple[Tokenizer, schema.Model, Dataset, Dataset]:
    """Return the tokenizer of a run, the model's options with its vocabulary, the data to train on, and the held-out data."""
    run_tokenizer = tokenizers.load(config.tokenizer)
    model = tokenizers.resolve_model(config, run_tokenizer)
    train = Dataset(config.data, run_tokenizer, config.seed, "train", model.vocabulary)
    held_out = Dataset(config.data, run_tokenizer, config.seed, "held_out", model.vocabulary, train.opened)
    return run_tokenizer, model, train, held_out


def samples_of(step: int, micro: int, options: schema.Data, data_rank: int, data_size: int) -> list[int]:
    """Return the sample numbers of one micro-batch. A step has the same samples at any data_size.

    Args:
        step, micro: number of the step, and of the micro-batch within it.
        options: options of the group data.
        data_rank, data_size: this data rank and the number of data ranks.
    Returns:
        options.micro_batch numbers.
    Raises:
        ValueError: the batch does not divide into micro-batches on each data rank.
    """
    share, remainder = divmod(options.batch, data_size)
    if remainder or share % options.micro_batch:
        raise ValueError(
            f"data.batch={options.batch}, data.micro_batch={options.micro_batch}: a step's sequences must divide into "
            f"micro-batches on each of {data_size} data ranks"
        )
    first = step * options.batch + data_rank * share + micro * options.micro_batch
    return list(range(first, first + options.micro_batch))


def permute(index: int, num: int, *key: object) -> int:
    """Return the image of `index` under a permutation of 0 … num − 1 that `key` selects, without a table.

    A Feistel network of four rounds, repeated until the result is below num. The table for a billion windows would take 8 GB.
    """
    half = max(1, ((num - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_number in range(4):
            left, right = right, left ^ (stable_hash(*key, round_number, right) & low)
        index = left << half | right
        if index < num:
            return index


def stable_hash(*key: object) -> int:
    """Return a 63-bit hash of the key's text, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()) >> 1


def _copy(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would wait for the GPU
