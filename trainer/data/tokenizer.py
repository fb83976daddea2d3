"""Tokenizers: bytes, a Hugging Face tokenizer.json, or a tiktoken file of ranks.

All three implement `Tokenizer`. Bytes need no file. The other two import their library on first use and read a local file; a
run never downloads a tokenizer.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ringspan.trainer.config import schema
from ringspan.trainer.config.mixture import BYTES_VOCABULARY, only_shards, tokenizer_file

# Usual names of the token that ends a document.
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|im_end|>")

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# number of ranks: (pattern that splits text, special tokens; the first is the end token). A file of ranks contains neither, but
# its number of ranks identifies the published file.
TIKTOKEN = {
    50256: (GPT2_PATTERN, {"<|endoftext|>": 50256}),  # r50k_base
    50280: (GPT2_PATTERN, {"<|endoftext|>": 50256}),  # p50k_base, which has ranks above its end token
    100256: (CL100K_PATTERN, {"<|endoftext|>": 100257}),  # cl100k_base
    128000: (CL100K_PATTERN, {"<|end_of_text|>": 128001, "<|begin_of_text|>": 128000}),  # Llama 3
    199998: (O200K_PATTERN, {"<|endoftext|>": 199999}),  # o200k_base
}


class Tokenizer(Protocol):
    """Converts between text and token ids."""

    size: int  # exclusive bound of the ids
    begin: tuple[int, ...]  # the id that begins a document, or nothing
    end: int  # the id that ends a document
    fingerprint: str  # key of the token cache

    def encode(self, documents: Sequence[bytes]) -> Iterable[np.ndarray]:
        """Return the ids of each document, without begin and end."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; ids without text are skipped."""
        ...


class Bytes:
    """One token per byte; 256 ends a document."""

    size, end, fingerprint = BYTES_VOCABULARY, 256, "bytes"
    begin: tuple[int, ...] = ()

    def encode(self, documents: Sequence[bytes]) -> Iterable[np.ndarray]:
        return (np.frombuffer(text, np.uint8) for text in documents)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HuggingFace:
    """A tokenizer.json, read with the package tokenizers. The names `begin` and `end` may be empty."""

    def __init__(self, path: Path, begin: str, end: str) -> None:
        tokenizers = _library("tokenizers", "hf")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer.path={str(path)!r} is no tokenizer.json: {error}") from None
        names = [end] if end else list(ENDS)
        end_ids = [i for i in map(self._tokenizer.token_to_id, names) if i is not None]
        if not end_ids:
            raise ValueError(
                f"tokenizer.end={end!r}: {path} has no token {' or '.join(names)}; name the one that ends a document"
            )
        if begin and self._tokenizer.token_to_id(begin) is None:
            raise ValueError(f"tokenizer.begin={begin!r}: {path} has no such token; name one that it has, or none")
        self.begin: tuple[int, ...] = (self._tokenizer.token_to_id(begin),) if begin else ()
        self.end = end_ids[0]
        # Ids may have gaps, so the number of tokens is no bound.
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = _fingerprint(path, "hf", end, *self.begin)

    def encode(self, documents: Sequence[bytes]) -> Iterable[np.ndarray]:
        texts = [text.decode(errors="replace") for text in documents]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return (np.asarray(encoding.ids, np.uint32) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i < self.size], skip_special_tokens=True)


class Tiktoken:
    """A .tiktoken file of one of the published encodings in TIKTOKEN. The names `begin` and `end` may be empty."""

    def __init__(self, path: Path, begin: str, end: str) -> None:
        tiktoken = _library("tiktoken", "tiktoken")
        try:
            pairs = (line.split() for line in path.read_bytes().splitlines() if line.strip())
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer.path={str(path)!r} is no tiktoken file; each line must be a token in base64 and its rank: {error}"
            ) from None
        if len(set(ranks.values())) < len(ranks) or any(bytes([byte]) not in ranks for byte in range(256)):
            raise ValueError(
                f"tokenizer.path={str(path)!r} is damaged: a rank occurs twice, or a single byte has none; copy the file again"
            )
        if len(ranks) not in TIKTOKEN:
            raise ValueError(
                f"tokenizer.path={str(path)!r} has {len(ranks)} ranks; only published files are known, which have "
                f"{', '.join(map(str, TIKTOKEN))}; use the tokenizer.json of this tokenizer: tokenizer.kind=hf"
            )
        pattern, special = TIKTOKEN[len(ranks)]
        for option, name in (("begin", begin), ("end", end)):
            if name and name not in special:
                raise ValueError(f"tokenizer.{option}={name!r}: {path} has {' and '.join(special)}; name one of these, or none")
        self.begin: tuple[int, ...] = (special[begin],) if begin else ()
        self.end = special[end or next(iter(special))]
        self._encoding: Any = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self._text_ids = set(ranks.values())
        self.size = max(self._text_ids | set(special.values())) + 1
        self.fingerprint = _fingerprint(path, "tiktoken", pattern, self.end, *self.begin)

    def encode(self, documents: Sequence[bytes]) -> Iterable[np.ndarray]:
        texts = [text.decode(errors="replace") for text in documents]
        return (np.asarray(ids, np.uint32) for ids in self._encoding.encode_ordinary_batch(texts))

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([i for i in ids if i in self._text_ids])


def load(options: schema.TokenizerOptions) -> Tokenizer:
    """Load the tokenizer that the options name; raise a ValueError if its file or library is missing."""
    if options.kind == "bytes":
        return Bytes()
    path = tokenizer_file(options)
    if options.kind == "hf":
        return HuggingFace(path, options.begin, options.end)
    return Tiktoken(path, options.begin, options.end)


def vocabulary_size(requested: int, tokenizer: Tokenizer) -> int:
    """Return the rows of the embedding: `requested`, or for 0 the tokenizer's size rounded up to a multiple of 64.

    Matmuls are fast at multiples of 64. Raise a ValueError if `requested` is smaller than the tokenizer's size.
    """
    if 0 < requested < tokenizer.size:
        raise ValueError(
            f"model.vocabulary={requested}: the tokenizer has {tokenizer.size} tokens; 0 takes these, rounded up to 64s"
        )
    return requested or -(-tokenizer.size // 64) * 64


def resolve_model(options: schema.Config, tokenizer: Tokenizer | None) -> schema.Model:
    """Return the model's options with vocabulary and max_positions filled in from the tokenizer and the data."""
    model = options.model
    rows = (model.max_positions or options.data.length) if model.positions == "learned" else 0
    known = model.vocabulary and only_shards(options.data)
    size = vocabulary_size(model.vocabulary, tokenizer) if tokenizer and not known else model.vocabulary
    return replace(model, vocabulary=size, max_positions=rows)


def resolve_config(config: schema.Config) -> schema.Config:
    """Return the config with a resolved model. With model.vocabulary set, the tokenizer's file is not needed."""
    tokenizer = None if config.model.vocabulary else load(config.tokenizer)
    return replace(config, model=resolve_model(config, tokenizer))


def _library(name: str, kind: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise ValueError(f"tokenizer.kind={kind} needs the package {name}: pip install {name}") from None


def _fingerprint(path: Path, *options: str | int) -> str:
    return hashlib.blake2b(path.read_bytes() + repr(options).encode(), digest_size=16).hexdigest()
