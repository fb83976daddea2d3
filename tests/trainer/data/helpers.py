"""Tokenizers, streams and options that the data tests share."""

import itertools
from pathlib import Path

import numpy as np

from ringspan.trainer.config.schema import Data, Source, TokenizerOptions
from ringspan.trainer.data import tokenizer
from ringspan.trainer.data.corpus import TokenStream

BYTES = tokenizer.load(TokenizerOptions())
END = BYTES.end


class BytesWithBegin(tokenizer.Bytes):
    """Bytes with a token that begins a document, as in Llama 3: its id is just below the end token's."""

    size, begin, end, fingerprint = 602, (600,), 601, "bytes-with-begin"


def stream(*documents: str) -> TokenStream:
    """A stream of letters, with ids 0 … 25; each document ends with END."""
    parts = [[ord(c) - ord("a") for c in text] + [END] for text in documents]
    ends = np.cumsum([len(part) for part in parts]) - 1
    return TokenStream([np.array([*itertools.chain(*parts)], np.uint16)], ends)


def data_options(folder: Path, length: int = 64, sources: dict[str, Source] | None = None, **options) -> Data:
    return Data(length=length, sources=sources or {"text": text_source(folder)}, cache=str(folder / "cache"), **options)


def text_source(folder: Path, num: int = 60) -> Source:
    (folder / "text").mkdir(exist_ok=True)
    for i in range(num):
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: " + "abcdefgh" * (i % 7 + 1))
    return Source(kind="text", paths=[str(folder / "text")])
