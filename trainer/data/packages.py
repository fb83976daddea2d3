"""Source and documentation of a fixed list of installed packages, as long documents: one per package.

The list has packages that every machine with Ringspan's requirements has, and Python's standard library. The files of a package
are joined in the order of their paths, each after a line with its path. A file whose text occurred earlier is left out. Whole
packages are held out: the packages of HELD_OUT are the last documents, so that no text of them is trained on.
"""

import functools
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ringspan.trainer.data.cache import Builder, open_cached
from ringspan.trainer.data.corpus import TokenStream, file_signatures, naming, stdlib_files
from ringspan.trainer.data.token_file import TokenFile
from ringspan.trainer.data.tokenizer import Tokenizer

STANDARD_LIBRARY = "python"
TRAINING = (
    STANDARD_LIBRARY, "torch", "triton", "numpy", "sympy", "mpmath", "fsspec", "filelock", "deepspeed", "hydra", "wandb",
    "einops", "hjson", "psutil", "packaging", "click", "requests", "platformdirs", "yaml",
)  # fmt: skip
HELD_OUT = ("networkx", "pydantic", "jinja2", "omegaconf", "tqdm")
SUFFIXES = (".py", ".pyi", ".md", ".rst")
BATCH = 256  # files per call of the tokenizer


@functools.cache
def package_files(name: str) -> list[Path]:
    """Return the source and documentation files of an installed package, without importing it.

    Raises:
        ValueError: the package is not installed.
    """
    if name == STANDARD_LIBRARY:
        return stdlib_files()
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ValueError(
            f"kind=packages: {name} is not installed; pip install 'ringspan[train]', or use kind=text with paths=[…]"
        )
    return sorted(Path(folder, file) for folder, _, files in os.walk(folders[0]) for file in files if file.endswith(SUFFIXES))


def open_packages(tokenizer: Tokenizer, cache: str, full: bool = False) -> TokenStream:
    """Open the packages as a stream of tokens, whose last documents are held out. Tokenize them if they are not in the cache.

    Args:
        tokenizer: the run's tokenizer.
        cache: the cache folder.
        full: verify every page of tokens, instead of a sample.
    Raises:
        ValueError: a package is not installed, or a file cannot be read.
    """
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    names = [*TRAINING, *HELD_OUT]
    signatures = [(name, file_signatures(package_files(name))) for name in names]
    folder = open_cached(
        cache, ["packages", tokenizer.fingerprint, signatures], lambda new: _tokenize(names, tokenizer, dtype, new), full
    )
    tokens, ends = TokenFile(folder.path / "tokens.bin", dtype), np.load(folder.path / "ends.npy")
    cut = int(ends[len(TRAINING) - 1]) + 1
    return TokenStream([tokens], ends, vocabulary=tokenizer.size, cached=folder, held_out_from=cut)


def _tokenize(names: Sequence[str], tokenizer: Tokenizer, dtype: np.dtype, new: Builder) -> None:
    """Write tokens.bin and ends.npy, a document per package."""
    seen: set[bytes] = set()
    ends, position = [], 0
    with new.open("tokens.bin") as out:
        for name in names:
            document = [np.array(tokenizer.begin, dtype)]
            files = package_files(name)
            for first in range(0, len(files), BATCH):
                texts = [text for file in files[first : first + BATCH] if (text := _read(file, name, seen, new))]
                document += [ids.astype(dtype) for ids in tokenizer.encode(texts)]
            document.append(np.array([tokenizer.end], dtype))
            out.write(np.concatenate(document).tobytes())
            position += sum(map(len, document))
            ends.append(position - 1)
    with new.open("ends.npy") as out:
        np.save(out, np.asarray(ends, np.int64))


def _read(file: Path, package: str, seen: set[bytes], new: Builder) -> bytes:
    """Return a file's text after a line with its path; nothing for a binary file, or for a text that occurred earlier."""
    with naming(file):
        text = file.read_bytes()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    new.inputs.append((os.path.abspath(file), len(text), digest.hex()))
    if not text.strip() or b"\0" in text[:8192] or digest in seen:
        return b""
    seen.add(digest)
    parts = file.parts
    start = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
    return f"# {'/'.join(parts[start:])}\n".encode() + text + b"\n"
