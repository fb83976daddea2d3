"""Text as bytes, packed into sequences: files in, batches out, nothing to download.

A file is a document and a byte is a token. Documents stand one after another in a stream; a token's label is the next
token of its document, and a document's last token has none. Only then is the stream cut into sequences, so the last
token of a sequence keeps a label that stands in the next one. The rest of a document that was cut is to the model a
document of its own: attention sees nothing of the sequence before, and positions start at 0.

Which sequences make a batch depends on the seed and the number of the step, and on nothing that was drawn before: a run
that goes on from step n needs to know n, no more.
"""

import functools
import glob
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import Mask

VOCABULARY = 256  # bytes
NO_LABEL = -100
PADDING = -1  # a document id: sees and is seen by nothing


def read_documents(pattern: str) -> list[bytes]:
    """The files that a glob pattern names, in an order that does not depend on the machine.

    The same text under two names counts once: it could otherwise be trained on and held out.
    """
    paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    documents = list(dict.fromkeys(text for text in (path.read_bytes() for path in paths) if text))
    if len(documents) < 2:
        raise ValueError(
            f"text={pattern!r} names {len(documents)} different files that are not empty; it takes at least 2, one to "
            "train on and one to hold out: give a glob pattern in quotes, such as 'docs/**/*.md'"
        )
    return documents


def split(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What to train on and what to hold out: one document in twenty, at least one.

    Their contents decide which, so every seed holds out the same.
    """
    ranked = sorted(documents, key=lambda text: (zlib.crc32(text), text))
    num_held_out = max(1, len(ranked) // 20)
    return ranked[num_held_out:], ranked[:num_held_out]


class Sequences(NamedTuple):
    """All (num_sequences, length), int32. The last sequence is filled up with padding, which has no labels."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor


class Batch(NamedTuple):
    """What the model's forward takes, in that order."""

    tokens: Tensor
    labels: Tensor
    mask: Mask
    positions: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The mask stays where it is: it moves its own numbers, once for all layers."""
        tokens, labels, positions = (send(x, device) for x in (self.tokens, self.labels, self.positions))
        return Batch(tokens, labels, self.mask, positions)


def pack(documents: list[bytes], length: int) -> Sequences:
    lengths = torch.tensor([len(text) for text in documents])
    tokens = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8).int()
    labels = tokens.roll(-1)
    labels[lengths.cumsum(0) - 1] = NO_LABEL
    ids = torch.repeat_interleave(torch.arange(len(documents), dtype=torch.int32), lengths)
    fill = (0, -len(tokens) % length)
    padded = (F.pad(x, fill, value=v) for x, v in ((tokens, 0), (labels, NO_LABEL), (ids, PADDING)))
    return Sequences(*(x.view(-1, length) for x in padded))


class Dataset:
    """Batches by number, for ever: every sequence once an epoch, in another order each epoch."""

    def __init__(self, documents: list[bytes], length: int, batch_size: int, seed: int) -> None:
        for name, value in (("length", length), ("batch", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed}: it must be at least 0 and below 2**32")
        self.sequences = pack([documents[i] for i in _order(len(documents), seed, epoch=-1)], length)
        self.batch_size = batch_size
        self.seed = seed

    def __len__(self) -> int:
        """Batches per epoch; the last may reach into the next epoch."""
        return -(-len(self.sequences.tokens) // self.batch_size)

    def batch(self, step: int) -> Batch:
        num, first = len(self.sequences.tokens), step * self.batch_size
        rows = torch.stack([_order(num, self.seed, i // num)[i % num] for i in range(first, first + self.batch_size)])
        tokens, labels, documents = (x[rows] for x in self.sequences)
        mask = Mask(causal=True, documents=documents)
        starts = mask.bounds().starts
        assert starts is not None, "the mask has documents"
        return Batch(tokens, labels, mask, torch.arange(tokens.shape[1], dtype=torch.int32) - starts)


def send(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would wait for the GPU


@functools.lru_cache(maxsize=8)  # a batch asks once for each of its sequences
def _order(num: int, seed: int, epoch: int) -> Tensor:
    """A permutation. Epoch -1 is the order in which documents are packed."""
    # One number from two: 2^20 epochs are more than anyone trains, so no two seeds share an order.
    return torch.randperm(num, generator=torch.Generator().manual_seed((seed << 20) + epoch + 1))
