"""File operations: whole writes, reads that cannot block, links that are not followed."""

import os
from pathlib import Path

import pytest

from ringspan.trainer import files


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_special_files_are_not_read(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(OSError, match=message):
        files.read_json(tmp_path / "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"", "Expecting value"),
        (b"[1]", "no JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_damaged_json_is_one_error_that_names_the_file(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "state.json").write_bytes(data)
    with pytest.raises(ValueError, match=f"state.json is not readable: .*{message}"):
        files.read_json(tmp_path / "state.json")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(files.MAX_JSON + 1)
    with pytest.raises(ValueError, match="at most"):
        files.read(tmp_path / "x")


def test_planted_links_are_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    for name in ("config.yaml.part", "config.yaml", "starts.jsonl"):
        (tmp_path / name).symlink_to(target)
    files.replace(tmp_path / "config.yaml", b"new")
    assert (tmp_path / "config.yaml").read_text() == "new" and not (tmp_path / "config.yaml").is_symlink()
    with pytest.raises(OSError, match="is a symbolic link"):
        files.open_append(tmp_path / "starts.jsonl")
    files.remove(tmp_path / "starts.jsonl")
    assert target.read_text() == "precious"


def test_a_failed_replacement_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    files.replace(tmp_path / "x", b"old")
    monkeypatch.setattr(files, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(tmp_path / "x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"


def test_discarded_links_keep_their_target(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("x")
    (tmp_path / "link").symlink_to("target")
    files.discard(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and (tmp_path / "target" / "file").exists()
