"""A run's records, metrics.jsonl, starts.jsonl and finished.json: strict JSON, one object per line, written whole.

Records never stop a run. A damaged one is renamed to NAME.bad, its readable lines stay, and one line says so. Imports no torch.
"""

import itertools
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringspan.trainer import files

MAX_BYTES = 2**40


def strict(value: Any) -> Any:
    """Return a value that JSON can express: floats with 9 digits, and null for NaN and infinity."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [strict(x) for x in value]
    return {k: strict(v) for k, v in value.items()} if isinstance(value, dict) else value


def parse(data: bytes) -> list[dict[str, Any] | None]:
    """Return the object of each line of a JSONL file; None for a line that is none."""
    lines: list[dict[str, Any] | None] = []
    for text in data.splitlines():
        try:
            line = files.parse_json(text)
        except ValueError:
            line = None
        lines.append(line if isinstance(line, dict) else None)
    return lines


def read(path: Path) -> list[dict[str, Any] | None]:
    """Return the lines of a JSONL file as `parse` does."""
    return parse(files.read(path, MAX_BYTES))


def rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> str:
    """Keep the lines of a JSONL file that `keep` accepts. A damaged file is set aside first; a cut last line is not damage.

    Args:
        path: the file; it may be absent.
        keep: called with a line's object; a KeyError, TypeError or ValueError in it is damage of the line.
    Returns:
        A line for the console, or "".
    """
    if not os.path.lexists(path):
        return ""
    note = ""
    if not stat.S_ISREG(path.lstat().st_mode):
        return f"{path}: no regular file; it is renamed to {set_aside(path).name}"
    data = files.read(path, MAX_BYTES)
    texts, kept, damaged = data.splitlines(), [], []
    for number, (text, line) in enumerate(zip(texts, parse(data), strict=True), 1):
        try:
            if line is None:
                raise ValueError
            if keep(line):
                kept.append(text)
        except (KeyError, TypeError, ValueError):
            if number < len(texts) or data.endswith(b"\n"):
                damaged.append(number)
    if damaged:
        bad = set_aside(path)
        note = f"{path}: line {damaged[0]} is damaged; the file is renamed to {bad.name}, and its other lines are kept"
    if damaged or len(kept) < len(texts):
        files.replace(path, b"".join(text + b"\n" for text in kept))
    return note


def set_aside(path: Path, suffix: str = ".bad") -> Path:
    """Rename a file to the first free one of NAME.bad, NAME.bad-2, …, and return the new path."""
    names = (path.with_name(f"{path.name}{suffix}{'' if n == 1 else f'-{n}'}") for n in itertools.count(1))
    target = next(name for name in names if not os.path.lexists(name))
    files.rename(path, target)
    return target


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a JSONL file and flush it to disk."""
    with files.open_append(path) as file:
        files.write(file, path, json.dumps(strict(line), allow_nan=False).encode() + b"\n")
        files.sync(file, path)


def last_saved(path: Path) -> int:
    """Return the last step whose checkpoint metrics.jsonl records, 0 if there is none or the file cannot be read."""
    try:
        lines = read(path)
    except (OSError, ValueError):
        return 0
    steps = [line.get("step") for line in lines if line and line.get("kind") == "checkpoint"]
    return max((step for step in steps if type(step) is int), default=0)
