"""Facts about data and tokenizer options that both the config and the data code need. Imports no torch."""

from pathlib import Path

from ringspan.trainer.config.schema import Data, TokenizerOptions

BYTES_VOCABULARY = 257  # 256 byte values and one token that ends a document
BLOCK = 1000  # consecutive samples over which the share of each source is exact


def shares(weights: dict[str, float]) -> list[int]:
    """Return the number of samples of each source in a block of BLOCK samples.

    The numbers are proportional to the weights, rounded by largest remainder.

    Args:
        weights: weight of each source, at least 0.
    Raises:
        ValueError: no weight is above 0, one is negative, or a source would never be drawn.
    """
    total = sum(weights.values())
    if not total > 0 or min(weights.values()) < 0:
        raise ValueError(f"data.sources have the weights {weights}: they must be at least 0, and one above 0")
    exact = [BLOCK * weight / total for weight in weights.values()]
    counts = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: BLOCK - sum(counts)]:
        counts[i] += 1
    for (name, weight), count in zip(weights.items(), counts, strict=True):
        if weight > 0 and count == 0:
            raise ValueError(
                f"data.sources.{name}.weight={weight:g}: less than 1 in {BLOCK} of all weights is never drawn; "
                f"give more, or leave it out: ~data.sources.{name}"
            )
    return counts


def tokenizer_file(options: TokenizerOptions) -> Path:
    """Return the file of a tokenizer of kind hf or tiktoken; raise a ValueError if there is none."""
    path = Path(options.path).expanduser()
    if options.path and path.is_dir():
        path = path / "tokenizer.json"
    if not options.path or not path.is_file():
        expected = "a .tiktoken file" if options.kind == "tiktoken" else "a tokenizer.json, or the folder it is in"
        raise ValueError(
            f"tokenizer.path={options.path!r}: tokenizer.kind={options.kind} needs a file that is on this machine, {expected}"
        )
    return path


def only_shards(data: Data) -> bool:
    """Whether all sources are token shards, so that the run itself tokenizes nothing."""
    return {source.kind for source in data.sources.values()} == {"tokens"}
