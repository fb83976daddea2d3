"""Replaced names and phrases stay out of code, documentation and commit subjects, which keep the commit convention."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/retired_names.txt"
BASE = "0a8801ca9acc1b7043517a266d28ab00846078aa"  # the convention holds for the commits after this one
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".txt", ".cff", ""}
EXEMPT = {LIST, Path(__file__), ROOT / "LICENSE"}


@functools.cache
def patterns() -> dict[str, tuple[str, re.Pattern[str]]]:
    """For each line of the list its first word in lower case, which is quick to search for, and a pattern."""
    found = {}
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            kind, _, text = line.partition(" ")
            insensitive = kind in ("word", "phrase")
            text = text if insensitive else line
            body = r"\s+".join(re.escape(part) for part in text.split())
            pattern = re.compile(rf"(?<![\w.]){body}(?!\w)", re.IGNORECASE if insensitive else 0)
            found[line] = text.split()[0].lower(), pattern
    return found


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def texts() -> list[Path]:
    names = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    paths = [ROOT / name for name in names]
    return [path for path in paths if path.is_file() and path.suffix in SUFFIXES and path not in EXEMPT]


def matches(text: str) -> list[str]:
    joined = re.sub(r"\n\s*#? ?", " ", text)  # a phrase may continue on the next line, also of a comment
    lower = joined.lower()
    return [line for line, (word, pattern) in patterns().items() if word in lower and pattern.search(joined)]


def test_retired_names_do_not_return() -> None:
    found = {str(path.relative_to(ROOT)): hits for path in texts() if (hits := matches(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize("text", ["what goes\n# home", "Nobody waits", "a Mover", "see kernels/beside.py"])
def test_a_retired_name_is_reported(text: str) -> None:
    assert matches(text)


@pytest.mark.parametrize("text", ["at work", "a remover", "nobodys", "the removers of Beside_s"])
def test_other_words_are_not_reported(text: str) -> None:
    assert not matches(text)


def test_commit_subjects_keep_the_convention() -> None:
    """`area: imperative`, at most 72 characters. A clone without the history has no subjects to check."""
    known = subprocess.run(["git", "cat-file", "-e", BASE], cwd=ROOT, capture_output=True).returncode == 0
    subjects = git("log", "--no-merges", "--format=%s", f"{BASE}..HEAD").splitlines() if known else []
    for subject in subjects:
        assert len(subject) <= 72 and re.match(r"[\w, /.*-]+: \S", subject) and not matches(subject), subject
