"""docs/api.py: the API reference equals what signatures and docstrings say."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ringspan
import ringspan.hf

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("docs_api", ROOT / "docs" / "api.py")
assert spec and spec.loader
api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api)


def example(x: torch.Tensor, at: list[tuple[int, int, int]], backend: str = "auto", *, last: bool = True) -> "Tensor":
    """Compute something.

    Further text, with a formula:

        out = x · x

    Args:
        x: (B, S), any dtype. The description
            goes on.
        at, last: Two at once.

    Returns:
        (S,), the result.

    Raises:
        ValueError: x is empty.
    """
    return x


class Example:
    """A class."""

    def __init__(self, size: int) -> None:
        """Take a size."""

    @property
    def half(self) -> int:
        """Half of it."""
        return 0

    def undocumented(self) -> None: ...

    @classmethod
    def of(cls, text: str) -> "Example":
        """Make one of a text."""
        return cls(len(text))


def test_the_page_is_up_to_date() -> None:
    assert api.render() == api.PAGE.read_text(encoding="utf-8"), "run python docs/api.py"
    assert api.main(["--check"]) == 0


def test_the_page_has_every_public_name_with_its_source_and_text() -> None:
    entries = re.split(r"^### ", api.render(), flags=re.MULTILINE)[1:]
    names = {entry.partition("\n")[0]: entry for entry in entries}
    assert names.keys() == {*ringspan.__all__, *ringspan.hf.__all__, *api.BLOCK_NAMES}
    for name, entry in names.items():
        path = re.search(r"^\[(\S+)\]\(\.\./\1\)$", entry, re.MULTILINE)
        assert path and (ROOT / path[1]).is_file(), name
        text = re.sub(r"```.*?```", "", entry, flags=re.DOTALL)
        assert len(text.split()) > 6, f"{name} has no docstring"


def test_a_long_signature_has_one_parameter_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    short = 'example(x: Tensor, at: list[Segment], backend: str = "auto", *, last: bool = True) -> Tensor'
    assert api.signature("example", example) == short
    monkeypatch.setattr(api, "WIDTH", 60)
    assert api.signature("example", example).splitlines() == [
        "example(",
        "    x: Tensor,",
        "    at: list[Segment],",
        '    backend: str = "auto",',
        "    *,",
        "    last: bool = True,",
        ") -> Tensor",
    ]


def test_a_docstring_becomes_markdown() -> None:
    assert api.description(example.__doc__).splitlines() == [
        "Compute something.",
        "",
        "Further text, with a formula:",
        "",
        "```text",
        "out = x · x",
        "```",
        "",
        "**Args**",
        "",
        "- `x`: (B, S), any dtype. The description",
        "  goes on.",
        "- `at`, `last`: Two at once.",
        "",
        "**Returns**",
        "",
        "(S,), the result.",
        "",
        "**Raises**",
        "",
        "- `ValueError`: x is empty.",
    ]
    assert api.description(None) == ""


def test_a_class_lists_its_documented_members() -> None:
    text = api.entry("Example", Example, api)
    assert [line for line in text if line.startswith("#")] == ["### Example", "#### Example.half", "#### Example.of"]
    assert text[1] == "[tests/docs/test_api.py](../tests/docs/test_api.py)"
    assert "```python\nExample(size: int)\n```" in text and "Take a size." in text
    assert "```python\nhalf: int\n```" in text and "```python\nof(text: str) -> Example\n```" in text
