"""Comparison of the data: of all ranks before step 1, of a run with its checkpoint, and of the ranks of a ring in each step.

    describe                 hash, tokenizer and files of each source; the hashes were made when the token cache was
    require_equal            raises if a rank reads other data than rank 0
    signed_checksum          one number per rank and step; its sum over all ranks is 0 if the ranks of each ring read the same
    explain_difference       the ranks and files of samples that differ

The ranks of a ring read different tokens of a sample, so that each also reads the same 64 tokens of it (`probes`). Rank 0 of a
ring of P adds (P − 1) · c to the step's all-reduce and each of the others −c. Sums of 32-bit numbers are exact in float64.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringspan.parallel.mesh import Mesh
from ringspan.trainer.config.compose import ConfigError
from ringspan.trainer.data.dataset import Batch, Corpus, Dataset
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.monitoring.check_timer import check_timer

MAX_FILES = 1000  # files of a source that a checkpoint names; with more a difference names the source only

Description = dict[str, dict[str, Any]]


class DifferentSamples(RuntimeError):
    """Ranks of a ring read different tokens of a sample; the message names ranks and files."""


def describe(data: Dataset, tokenizer: Tokenizer) -> Description:
    """Return {source: {"sha256", "tokens", "tokenizer", "files"}} of the data that this rank reads, as JSON can hold it."""
    result: Description = {}
    for name, source in zip(data.names, data.sources, strict=True):
        result[name] = dict(tokenizer=tokenizer.fingerprint, sha256="", tokens=0, files=[])
        if isinstance(source, Corpus) and source.stream.cached is not None:
            folder, stream = source.stream.cached, data.opened[name]
            files = [list(file) for file in folder.files]
            result[name] |= dict(sha256=folder.sha256, tokens=len(stream), files=files)
            if folder.is_external:
                result[name]["tokenizer"] = ""  # the shards were made by another program
    return result


def for_checkpoint(description: Description) -> Description:
    """Return the part of a description that a checkpoint keeps."""
    return {name: {**source, "files": source["files"][: MAX_FILES + 1]} for name, source in description.items()}


def require_equal(description: Description, gather: Callable[[Any], list[Any]]) -> None:
    """Compare the data of all ranks, which call this together.

    Args:
        description: this rank's data.
        gather: returns a JSON value of each rank on all ranks.
    Raises:
        ConfigError: on all ranks, if a rank reads other data than rank 0; the text names ranks and files.
    """
    each = gather([[name, source["sha256"], source["tokenizer"]] for name, source in description.items()])
    if all(hashes == each[0] for hashes in each):
        return
    descriptions, lines = gather(description), []
    for rank, hashes in enumerate(each):
        if hashes != each[0]:
            lines += differences(descriptions[rank], descriptions[0], f"rank {rank}", "rank 0")
    raise ConfigError("\n".join(f"{line}; copy the same files to every host" for line in lines))


def require_unchanged(description: Description, saved: Description, step: str, accepted: Sequence[str]) -> list[str]:
    """Compare the data of a run with that of its checkpoint.

    Args:
        description: this rank's data.
        saved: the checkpoint's; sources that it lacks are not compared.
        step: name of the checkpoint.
        accepted: options whose change is accepted, checkpoint.changed.
    Returns:
        The accepted differences.
    Raises:
        ConfigError: they differ otherwise; the text names the files.
    """
    allowed: list[str] = []
    refused: list[str] = []
    if not isinstance(saved, dict):
        raise ConfigError(f"{step} is damaged: the hashes of its data are no object; take another checkpoint")
    for name in description.keys() & saved.keys():
        option = f"data.sources.{name}"
        try:
            lines = differences({name: description[name]}, saved, "this run", step)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{step} is damaged: its hash of {option} is not readable ({error!r}); take another one"
            ) from None
        is_accepted = any(option == key or option.startswith(f"{key}.") for key in accepted)
        (allowed if is_accepted else refused).extend(lines)
    if refused:
        ways = "restore the files, or take checkpoint.changed=[data.sources] to continue with the changed ones"
        raise ConfigError("\n".join(f"{line}; {ways}" for line in sorted(refused)))
    return sorted(allowed)


def differences(a: Description, b: Description, name_a: str, name_b: str) -> list[str]:
    """Return a line for each source of `a` that differs from that of `b`; the names are those of a and b in the text."""
    lines = []
    for name, one in a.items():
        other = b.get(name, {})
        start = f"data.sources.{name}: {name_a} reads other data than {name_b}: "
        if other.get("tokenizer") != one["tokenizer"]:
            lines.append(f"{start}their tokenizers differ")
        elif other["sha256"] != one["sha256"]:
            lines.append(start + _first_difference(one["files"], other["files"], name_b))
    return lines


def _first_difference(a: list[list[Any]], b: list[list[Any]], name_b: str) -> str:
    """Return a text about the first file that only one side has, or that both have with other content."""
    if max(len(a), len(b)) > MAX_FILES:
        return f"{len(a)} files, {len(b)} there"
    keys_a, keys_b = ({(os.path.basename(path), digest) for path, _, digest in files} for files in (a, b))
    only_a = [file for file in a if (os.path.basename(file[0]), file[2]) not in keys_b]
    only_b = [file for file in b if (os.path.basename(file[0]), file[2]) not in keys_a]
    if not only_a and not only_b:
        return "the files are equal, but not their order or the version of the tokenizer's library"
    count = max(len(only_a), len(only_b)) - 1
    more = f", and {count} more" if count else ""
    for file in only_a:
        for twin in only_b:
            if os.path.basename(file[0]) == os.path.basename(twin[0]):
                return f"{_file(file)} differs from {_file(twin)} of {name_b}{more}"
    return f"{_file(only_a[0])} is not in {name_b}{more}" if only_a else f"{_file(only_b[0])} is only in {name_b}{more}"


def _file(file: list[Any]) -> str:
    path, size, digest = file
    return f"{path} ({size:,} bytes, hash {digest[:8]})"


def checksum(batch: Sequence[Batch]) -> int:
    """Return a 32-bit checksum of the samples of a step."""
    return zlib.crc32(np.array([value for micro in batch for value in micro.checksums], np.uint32).tobytes())


def signed_checksum(batch: Sequence[Batch], mesh: Mesh) -> float:
    """Return this rank's number, whose sum over the ranks of a ring is 0 if their checksums are equal."""
    with check_timer("samples"):
        return float(checksum(batch) * (mesh.context_size - 1 if mesh.context_rank == 0 else -1))


def explain_difference(data: Dataset, batch: Sequence[Batch], mesh: Mesh, gather: Callable[[Any], list[Any]]) -> str:
    """Return a message about samples that ranks of a ring read differently. All ranks call this together."""
    samples = [(sample, value) for micro in batch for sample, value in zip(micro.samples, micro.checksums, strict=True)]
    each = gather([mesh.data_rank, mesh.context_rank, samples, [data.origin(sample) for sample, _ in samples]])
    lines = []
    for rank, (ring, place, values, origins) in enumerate(each):
        first = next(i for i, other in enumerate(each) if other[0] == ring and other[1] == 0)
        for index, (sample, value) in enumerate(values):
            if place and value != each[first][2][index][1]:
                lines.append(
                    f"sample {sample} differs between rank {first} ({each[first][3][index]}) and rank {rank} ({origins[index]})"
                )
                break
    return "\n".join(lines)
