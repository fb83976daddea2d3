"""How many samples each source of a mixture has. Without torch, for the check before the start asks it too."""

from pathlib import Path

from ringspan.trainer.config.schema import Data, TokenizerOptions

BYTES_VOCABULARY = 257  # 256 byte values and one token that ends a document
BLOCK = 1000  # samples in which each source's share is exact


def shares(weights: dict[str, float]) -> list[int]:
    """How many of a block's samples each source has: in proportion to the weights, by largest remainder."""
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


def file_of(options: TokenizerOptions) -> Path:
    """What the options' tokenizer is read from."""
    path = Path(options.path).expanduser()
    if options.path and path.is_dir():
        path = path / "tokenizer.json"
    if not options.path or not path.is_file():
        wanted = "a .tiktoken file" if options.kind == "tiktoken" else "a tokenizer.json, or the folder it is in"
        needs = f"tokenizer.kind={options.kind} needs a file that is on this machine, {wanted}"
        raise ValueError(f"tokenizer.path={options.path!r}: {needs}")
    return path


def only_shards(data: Data) -> bool:
    """Whether all ids were made elsewhere, so that a run needs the tokenizer for nothing."""
    return {source.kind for source in data.sources.values()} == {"tokens"}
