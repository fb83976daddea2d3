"""Records: damage is set aside by name, readable lines stay, a cut last line is no damage."""

import json
import os
from pathlib import Path

import pytest

from ringspan.trainer.monitoring import records, tracking

GOOD = b'{"kind": "train", "step": 1}\n'


@pytest.mark.parametrize(
    "line",
    [b"7", b"[]", b'"x"', b"null", b"{}", b'{"step": "x", "kind": "train"}', b'{"step": 1}', b"\xff\xfe", b"[" * 100_000,
     b"{" * 9, b'{"kind": "train", "step": 1, "step": 2}', b""],
)  # fmt: skip
def test_a_damaged_line_is_set_aside(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    data = GOOD + line + b"\n" + GOOD.replace(b"1", b"2")
    path.write_bytes(data)
    (note,) = tracking._truncate(path, 5, 9)
    assert note == f"{path}: line 2 is damaged; the file is renamed to metrics.jsonl.bad, and its other lines are kept"
    assert path.read_bytes() == GOOD + GOOD.replace(b"1", b"2") and (tmp_path / "metrics.jsonl.bad").read_bytes() == data
    path.write_bytes(data)
    assert "metrics.jsonl.bad-2" in tracking._truncate(path, 5, 9)[0], "an earlier one is not replaced"


def test_a_cut_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + GOOD[:-9])
    assert tracking._truncate(path, 5, 9) == [] and path.read_bytes() == GOOD and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("precious")])
def test_what_is_no_file_is_set_aside(tmp_path: Path, make) -> None:
    make(tmp_path / "metrics.jsonl")
    (note,) = tracking._truncate(tmp_path / "metrics.jsonl", 5, 9)
    assert "no regular file; it is renamed to metrics.jsonl.bad" in note and not os.path.lexists(tmp_path / "metrics.jsonl")


def test_the_curve_of_an_earlier_training_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for suffix in ("old", "old-2"):
        path.write_bytes(GOOD)
        assert f"kept in metrics.jsonl.{suffix}" in tracking._truncate(path, 0, 9)[0]
        assert not path.exists() and (tmp_path / f"metrics.jsonl.{suffix}").read_bytes() == GOOD


def test_last_saved_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert records.last_saved(path) == 0
    for step in (2, 4):
        records.append(path, dict(kind="checkpoint", step=step, seconds=float("inf")))
    records.append(path, dict(kind="train", step=9))
    with path.open("ab") as file:
        file.write(b'{"kind": "checkpoint", "step": "x"}\n7\n{"kind": "check')
    assert records.last_saved(path) == 4 and json.loads(path.read_bytes().splitlines()[0])["seconds"] is None
    assert tracking._truncate(path, 4, 4) and records.last_saved(path) == 4, "a repeated report of the last step keeps it"
