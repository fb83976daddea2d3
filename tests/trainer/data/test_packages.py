"""Installed packages as a corpus: one document each, equal files once, whole packages held out."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data import fingerprint, packages
from ringspan.trainer.data.dataset import Dataset
from tests.trainer.data.helpers import BYTES, END


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Three packages, of which `held` is held out and shares a file with `one`."""
    texts = {
        "one/a.py": "first", "one/sub/b.md": "second", "one/c.so": "binary", "one/d.py": "nul\0", "one/e.py": "first",
        "two/a.rst": "third" * 20, "held/a.py": "second", "held/b.py": "fourth" * 20,
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(packages, "TRAINING", ("one", "two"))
    monkeypatch.setattr(packages, "HELD_OUT", ("held",))
    packages.package_files.cache_clear()
    yield Data(length=32, sources={"p": Source(kind="packages")}, cache=str(tmp_path / "cache"))
    packages.package_files.cache_clear()


def documents(data: Dataset) -> list[str]:
    stream = data.sources[0].stream
    text = "".join("|" if token == END else chr(token) for token in stream.read(np.arange(len(stream))))
    return text.split("|")[:-1]


def test_each_package_is_a_document_and_whole_packages_are_held_out(options: Data) -> None:
    train, held_out = (Dataset(options, BYTES, 0, part) for part in ("train", "held_out"))
    one, two = documents(train)
    assert one == "# one/a.py\nfirst\n# one/sub/b.md\nsecond\n" and two == f"# two/a.rst\n{'third' * 20}\n"
    assert documents(held_out) == [f"# held/b.py\n{'fourth' * 20}\n"]  # its other file is in `one`


def test_the_hash_covers_the_list_and_the_text(options: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for change in (lambda: None, lambda: monkeypatch.setattr(packages, "TRAINING", ("two", "one")), None):
        if change:
            change()
        else:
            (tmp_path / "two" / "a.rst").write_text("fifth" * 21)
        description = fingerprint.describe(Dataset(options, BYTES, 0), BYTES)["p"]
        hashes.append(description["sha256"])
        assert len(description["files"]) == 7
    assert len(set(hashes)) == 3


def test_a_missing_package_is_named(options: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "HELD_OUT", ("no_such_package",))
    with pytest.raises(ValueError, match=r"data\.sources\.p: kind=packages: no_such_package is not installed; pip install"):
        Dataset(options, BYTES, 0)


def test_the_list_is_installed_and_disjoint() -> None:
    assert not set(packages.TRAINING) & set(packages.HELD_OUT)
    assert all(packages.package_files(name) for name in (*packages.TRAINING, *packages.HELD_OUT))
