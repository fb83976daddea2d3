"""Train a byte-level BPE tokenizer on installed packages, or on text, and write its tokenizer.json.

    ringspan tokenizer to=runs/bpe-4k size=4096
    ringspan tokenizer to=mine size=32768 paths=[~/books,notes/*.md]

Each digit is a token of its own, so that numbers of any length have the same form. Held-out packages are not read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import TrainTokenizer
from ringspan.trainer.data import packages
from ringspan.trainer.data.corpus import text_files
from ringspan.trainer.files import replace

PROGRAM = "ringspan tokenizer"
END = "<|endoftext|>"
MAX_BYTES = 2**25  # of text: more changes few merges of a small vocabulary, and takes minutes


def train(files: list[Path], size: int) -> Any:
    """Return a tokenizer of the package tokenizers with `size` tokens, one of which ends documents.

    Args:
        files: text files; every n-th is read, so that they have about MAX_BYTES.
        size: tokens, at least the 256 bytes and the end token.
    Raises:
        ValueError: the package tokenizers is missing, or the size is too small.
    """
    if size < 257:
        raise ValueError(f"size={size}: 256 bytes and the end of a document are tokens; take at least 257")
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("ringspan tokenizer needs the package tokenizers: pip install tokenizers") from None
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_texts(files), trainer)
    return tokenizer


def _texts(files: list[Path]) -> Iterator[str]:
    stride = 1 + sum(file.stat().st_size for file in files) // MAX_BYTES
    for file in files[::stride]:
        text = file.read_bytes()
        if b"\0" not in text[:8192]:
            yield text.decode(errors="replace")


def main(argv: list[str] | None = None) -> None:
    options = compose.parse_flat(TrainTokenizer, PROGRAM, __doc__, argv)
    try:
        if not options.to:
            raise ValueError("to='': name the folder to write")
        names = [file for name in packages.TRAINING for file in packages.package_files(name)] if not options.paths else []
        tokenizer = train(names or text_files(options.paths), options.size)
        folder = Path(options.to).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    except ValueError as error:
        compose.fail(PROGRAM, error)
    except OSError as error:
        compose.fail(PROGRAM, ValueError(f"to={options.to!r}: {error.strerror or error}; choose another folder"))
    print(f"{tokenizer.get_vocab_size()} tokens: use them with tokenizer=hf tokenizer.path={options.to}")


if __name__ == "__main__":
    main()
