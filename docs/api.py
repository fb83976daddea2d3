"""Generate docs/api.md, the API reference, from signatures and docstrings.

    python docs/api.py              # rewrites docs/api.md
    python docs/api.py --check      # changes nothing; exits 1 if docs/api.md is stale

The page has every name of ringspan.__all__ and ringspan.hf.__all__, and the block functions of ringspan.kernels.blocks.
"""

import argparse
import importlib
import inspect
import re
import sys
import typing
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100  # of a signature in one line
INTRODUCTION = """\
# API reference

`docs/api.py` generates this page from signatures and docstrings: `make tables` runs it, and a test compares.

Public names are imported from `ringspan`: `from ringspan import attention, Mask`; those for models of transformers from
`ringspan.hf`. The signatures of other packages are in [Ringspan in place of another ring](guides/other-packages.md).

Shapes are written (B, S, Hq, D): batch, length, query heads, head dim. Guides: [attention](guides/attention.md),
[ring](guides/ring.md), [training](guides/training.md). Terms: [glossary](glossary.md).
"""
SECTIONS = {  # title: package whose public names it has
    "One GPU": "ringspan.kernels",
    "Many GPUs": "ringspan.parallel",
    "Models of transformers": "ringspan.hf",
}
BLOCKS = """\
## Blocks of keys

A ring computes attention one block of keys at a time with these functions of `ringspan.kernels.blocks`. Every backend
implements them, and `attention` is one call of each.
"""
BLOCK_NAMES = ("Segment", "block_forward", "output_delta", "block_backward")
HEADINGS = ("Args", "Arguments", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples", "Note", "Notes")
LISTS = ("Args", "Arguments", "Attributes", "Raises")  # "name: text" items
INTERNAL = {  # methods for other packages of ringspan, or that a Trainer calls, without use to a caller
    *(f"Mask.{name}" for name in ("bounds", "from_bounds", "host_mask", "covers_block", "has_padding")),
    *(f"Mask.{name}" for name in ("joint_segments", "with_tables", "documents_batch", "prefix_batch")),
    "Layout.check_mask",
    *(f"TrainerMixin.{name}" for name in ("get_cp_size", "floating_point_ops", "compute_loss", "prediction_step")),
}
ALIASES = {"Segment": "Rows of a local tensor as (start, step, count): row i of the segment has position start + i · step."}


def source_link(value: Any, module: ModuleType) -> str:
    """Link to the file that defines a value, relative to docs/."""
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(value)) or "")
    except TypeError:  # an alias has no source of its own
        path = Path(inspect.getsourcefile(module) or "")
    path = path.resolve().relative_to(ROOT)
    return f"[{path.as_posix()}](../{path.as_posix()})"


def signature(name: str, value: Any) -> str:
    """A signature on one line, or one parameter per line."""
    function = inspect.signature(value)
    keep = [p for p in function.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    function = function.replace(parameters=keep)
    if inspect.isclass(value) or function.return_annotation is None:
        function = function.replace(return_annotation=inspect.Signature.empty)
    line = _short_names(f"{name}{function}")
    if len(line) <= WIDTH:
        return line
    lines, kinds = [], [p.kind for p in keep]
    for index, parameter in enumerate(keep):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and inspect.Parameter.KEYWORD_ONLY not in kinds[:index]:
            lines.append("*")
        lines.append(_short_names(str(parameter)))
    returns = _short_names(str(function.replace(parameters=[]))).removeprefix("()")
    return "\n".join([f"{name}(", *(f"    {text}," for text in lines), f"){returns}"])


def _short_names(text: str) -> str:
    """torch.Tensor → Tensor: the module that a class comes from differs between versions of torch. Segments get their name."""
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text).replace("tuple[int, int, int]", "Segment")
    text = re.sub(r"(: |-> )'([\w\[\], |]+)'", r"\1\2", text)  # a quoted annotation
    return re.sub(r"= '(\w*)'", r'= "\1"', text)


def description(text: str | None) -> str:
    """A docstring as Markdown: Args and Raises become lists, indented text becomes code."""
    lines = inspect.cleandoc(text or "").splitlines()
    blocks: list[str] = []
    position = 0
    while position < len(lines):
        heading = lines[position].removesuffix(":")
        if lines[position].endswith(":") and heading in HEADINGS:
            position, body = _indented(lines, position + 1)
            blocks += [f"**{heading}**", _items(body) if heading in LISTS else _markdown(body, heading)]
        elif lines[position].startswith("    "):
            position, body = _indented(lines, position)
            blocks.append("\n".join(["```text", *inspect.cleandoc("\n" + "\n".join(body)).splitlines(), "```"]))
        elif lines[position].strip():
            first = position
            while position < len(lines) and lines[position].strip() and not lines[position].startswith("    "):
                if position > first and lines[position].removesuffix(":") in HEADINGS:
                    break
                position += 1
            blocks.append("\n".join(lines[first:position]))
        else:
            position += 1
    return "\n\n".join(blocks)


def _indented(lines: list[str], first: int) -> tuple[int, list[str]]:
    """The end of the indented lines from `first` on, and these lines; blank lines between them belong to them."""
    end = first
    while end < len(lines) and (lines[end].startswith("  ") or not lines[end].strip()):
        end += 1
    body = lines[first:end]
    while body and not body[-1].strip():
        body.pop()
    return end, body


def _markdown(body: list[str], heading: str) -> str:
    text = inspect.cleandoc("\n" + "\n".join(body))
    return f"```python\n{text}\n```" if heading.startswith("Example") else text


def _items(body: list[str]) -> str:
    """`name: text` items, whose further lines are indented more."""
    items: list[str] = []
    for line in inspect.cleandoc("\n" + "\n".join(body)).splitlines():
        match = re.match(r"(\**[\w.]+(?:, \**[\w.]+)*)(?: \([^)]*\))?: ?(.*)", line)
        if match and not line.startswith(" "):
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            items.append(f"- {names}: {match[2]}".rstrip())
        elif line.strip():
            items.append(f"  {line.strip()}" if items else line)
    return "\n".join(items)


def members(kind: type) -> dict[str, Any]:
    """Methods and properties that a class defines itself and documents, without internal ones."""
    methods = {}
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
        hidden = name.startswith("_") or f"{kind.__name__}.{name}" in INTERNAL
        if not hidden and inspect.isfunction(function) and function.__doc__:
            methods[name] = value
    return methods


def entry(name: str, value: Any, module: ModuleType, level: str = "###") -> list[str]:
    """One name: heading, source, signature, docstring; of a class also its members."""
    if typing.get_origin(value) is not None:  # a type alias
        alias = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", str(value))
        return [f"{level} {name}", source_link(value, module), f"```python\n{name} = {alias}\n```", ALIASES.get(name, "")]
    lines = [f"{level} {name}", source_link(value, module), f"```python\n{signature(name, value)}\n```"]
    if not inspect.isclass(value):
        return [*lines, description(value.__doc__)]
    init = vars(value).get("__init__")  # the docstring of a generated or inherited one says nothing
    lines += [description(value.__doc__ if _documented(value) else None), description(getattr(init, "__doc__", None))]
    for member, attribute in members(value).items():
        title = f"{level}# {name}.{member}"
        if isinstance(attribute, property | cached_property):
            getter = attribute.fget if isinstance(attribute, property) else attribute.func
            result = inspect.signature(getter).return_annotation
            text = "" if result is inspect.Signature.empty else f": {inspect.formatannotation(result)}"
            code = _short_names(f"{member}{text}")
            lines += [title, f"```python\n{code}\n```", description(getter.__doc__)]
        else:
            bound = getattr(value, member)
            lines += [title, f"```python\n{signature(member, bound)}\n```", description(bound.__doc__)]
    return lines


def _documented(kind: type) -> bool:
    """A dataclass without a docstring gets its signature as one."""
    return not (kind.__doc__ or "").startswith(f"{kind.__name__}(")


def render() -> str:
    """The whole page."""
    packages = [importlib.import_module(name) for name in ("ringspan", "ringspan.hf")]
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    parts = [INTRODUCTION]
    for title, package in SECTIONS.items():
        names = [name for name in public if public[name].__module__.startswith(package)]
        if names:
            parts.append(f"## {title}")
        for name in sorted(names, key=lambda name: (inspect.isclass(public[name]), name)):
            parts += entry(name, public[name], importlib.import_module(public[name].__module__))
            del public[name]
    assert not public, f"{sorted(public)}: add their package to SECTIONS in docs/api.py"
    functions, segments = (importlib.import_module(f"ringspan.kernels.{name}") for name in ("blocks", "segments"))
    parts.append(BLOCKS)
    for name in BLOCK_NAMES:
        parts += entry(name, getattr(functions, name), segments if name == "Segment" else functions)
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    arguments = parser.parse_args(argv)
    text = render()
    if arguments.check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not fresh:
            print("docs/api.md is stale: run python docs/api.py")
        return int(not fresh)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
