"""Differences of data are found and named: between ranks, between a run and its checkpoint, between samples of a ring."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspan.trainer.config.compose import ConfigError
from ringspan.trainer.config.schema import Source
from ringspan.trainer.data import fingerprint
from ringspan.trainer.data.dataset import Dataset
from tests.trainer.data.helpers import BYTES, BytesWithBegin, data_options


def dataset(folder: Path, files: dict[str, str], kind: str = "text", tokenizer: Any = BYTES) -> Dataset:
    """A data set over files with these texts, or shards of these bytes, in a folder of its own."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / "in" / name).write_bytes(text.encode())
    source = Source(kind=kind, paths=[str(folder / "in")], **(dict(dtype="uint16") if kind == "tokens" else {}))
    return Dataset(
        data_options(folder, 16, {"mine": source, "recall": Source(kind="recall", keys=1)}), tokenizer, 0, "train", 2**16
    )


def described(data: Dataset, tokenizer: Any = BYTES) -> fingerprint.Description:
    return json.loads(json.dumps(fingerprint.describe(data, tokenizer)))


TEXTS = {"a.txt": "the first text of two", "b.txt": "and the second text, which is longer"}


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_equal_files_in_other_folders_are_equal_data(tmp_path: Path, kind: str) -> None:
    texts = {name: text + " " * (len(text) % 2) for name, text in TEXTS.items()}
    one, two = (described(dataset(tmp_path / name, texts, kind)) for name in ("one", "two"))
    assert one["mine"]["files"] != two["mine"]["files"] and one["mine"]["tokens"] == two["mine"]["tokens"] > 20
    assert fingerprint.differences(one, two, "x", "y") == []
    fingerprint.require_equal(one, lambda value: [value, value])


FILE = r"\(\d+ bytes, hash \w+\)"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda texts: texts | {"b.txt": texts["b.txt"].upper()}, rf"/two/in/b.txt {FILE} differs from \S+/one/in/b.txt"),
        (lambda texts: texts | {"c.txt": "a third text"}, rf"/two/in/c.txt {FILE} is not in rank 0"),
        (lambda texts: {"b.txt": texts["b.txt"]}, rf"/one/in/a.txt {FILE} is only in rank 0"),
    ],
)
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_difference_between_ranks_names_rank_and_file(tmp_path: Path, kind: str, change: Any, expected: str) -> None:
    texts = {name: text + " " * (len(text) % 2) for name, text in TEXTS.items()}
    one, two = described(dataset(tmp_path / "one", texts, kind)), described(dataset(tmp_path / "two", change(texts), kind))

    def gather(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [one, one, two]
        return [[[name, source["sha256"], source["tokenizer"]] for name, source in x.items()] for x in (one, one, two)]

    message = rf"^data.sources.mine: rank 2 reads other data than rank 0: \S*{expected}.*; copy the same"
    with pytest.raises(ConfigError, match=message):
        fingerprint.require_equal(one, gather)


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    one = described(dataset(tmp_path / "one", TEXTS))
    two = described(dataset(tmp_path / "two", TEXTS, tokenizer=BytesWithBegin()), BytesWithBegin())
    lines = fingerprint.differences(two, one, "this run", "step-00000004")
    assert lines[0] == "data.sources.mine: this run reads other data than step-00000004: their tokenizers differ"
    assert lines[1].startswith("data.sources.recall: ")


def test_changed_data_is_an_error_until_it_is_accepted(tmp_path: Path) -> None:
    one, two = described(dataset(tmp_path / "one", TEXTS)), described(dataset(tmp_path / "two", TEXTS | {"a.txt": "changed"}))
    saved = json.loads(json.dumps(fingerprint.for_checkpoint(one)))
    fingerprint.require_unchanged(one, saved, "step-00000004", [])
    for accepted in ("data", "data.sources", "data.sources.mine"):
        assert len(fingerprint.require_unchanged(two, saved, "step-00000004", ["rope", accepted])) == 1
    fingerprint.require_unchanged(two, {}, "step-00000004", [])  # a checkpoint of a version without this record
    message = r"this run reads other data than step-00000004: \S+/a.txt .*; restore the files, or take checkpoint.changed="
    with pytest.raises(ConfigError, match=message):
        fingerprint.require_unchanged(two, saved, "step-00000004", ["rope"])


@pytest.mark.parametrize("forged", [3, [1], {"text": 3}, {"text": {}}, {"text": {"tokenizer": "t", "sha256": 1, "files": [1]}}])
def test_forged_hashes_of_a_checkpoint_are_damage(forged: Any) -> None:
    own = {"text": {"tokenizer": "t", "sha256": "a", "files": [["x", 1, "abcdefgh"]]}}
    with pytest.raises(ConfigError, match=r"step-1 is damaged|other data than step-1"):
        fingerprint.require_unchanged(own, forged, "step-1", [])


def test_order_of_equal_shards_counts(tmp_path: Path) -> None:
    texts = {name: text + " " * (len(text) % 2) for name, text in TEXTS.items()}
    one = described(dataset(tmp_path / "one", texts, "tokens"))
    two = described(dataset(tmp_path / "two", {"a.txt": texts["b.txt"], "b.txt": texts["a.txt"]}, "tokens"))
    (line,) = fingerprint.differences(two, one, "rank 1", "rank 0")
    assert "differs from" in line and "and 1 more" in line


class Place:
    """The part of a mesh that checksums need."""

    def __init__(self, context_rank: int, context_size: int, data_rank: int = 0) -> None:
        self.context_rank, self.context_size, self.data_rank = context_rank, context_size, data_rank


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("changed", [False, True])
def test_signed_checksums_of_a_ring_sum_to_zero_only_if_its_samples_are_equal(tmp_path: Path, size: int, changed: bool) -> None:
    """Each rank owns other positions; the last rank of the second ring may read a changed file."""
    import torch

    long = {"a.txt": "the text of all ranks, long enough for some windows. " * 40}
    good = dataset(tmp_path / "one", long)
    bad = dataset(tmp_path / "two", {"a.txt": long["a.txt"].replace("text", "test")})
    total = 0.0
    for ring in (0, 1):
        for rank in range(size):
            data = bad if changed and ring == 1 and rank == size - 1 else good
            owned = torch.arange(rank * 16 // size, (rank + 1) * 16 // size)
            batch = [data.batch([100 * ring + i, 100 * ring + i + 1], owned) for i in (0, 2, 4, 6, 8)]
            total += fingerprint.signed_checksum(batch, Place(rank, size, ring))  # type: ignore[arg-type]
    assert (total != 0) == (changed and size > 1)


def test_a_different_sample_names_ranks_files_and_the_damaged_one(tmp_path: Path) -> None:
    text = {"a.bin": "".join(chr(97 + i % 26) for i in range(20_000))}
    good, bad = (dataset(tmp_path / name, text, "tokens") for name in ("one", "two"))
    shard = tmp_path / "two" / "in" / "a.bin"
    tokens = np.fromfile(shard, np.uint16)
    with shard.open("r+b") as file:
        file.write(tokens[::-1].tobytes())
    sample = next(i for i in range(9) if good.locate(i)[0] == 0)
    each = [
        [0, rank, [[sample, data.batch([sample]).checksums[0]]], [data.origin(sample)]] for rank, data in enumerate((good, bad))
    ]
    message = fingerprint.explain_difference(good, [], Place(0, 2), lambda value: each)  # type: ignore[arg-type]
    assert message.startswith(
        f"sample {sample} differs between rank 0 (data.sources.mine, {tmp_path}/one/in/a.bin) and rank 1 "
    )
    assert message.endswith(f"(data.sources.mine, {shard}: {shard} has changed since its checksum was made, near byte 0)")
