"""What options there are, and in words what is wrong with one: for `compose`. Imports no torch."""

import difflib
import functools
import re
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ringspan.trainer.config.schema import Config, Data, Source

CONF = Path(__file__).resolve().parents[2] / "conf"
USAGE = """usage: {program} [key=value | group=choice | experiment=name] …

  --help             this page            --cfg job          print the config that results, and stop
  --config-dir=DIR   YAML of your own, in folders named like conf/'s
  --ranks=N          ringspan launch: how many ranks to start (one for each GPU; 2 without)
  --multirun         ringspan launch: key=a,b starts one run after the other"""


@functools.cache
def option_names(schema: type = Config, prefix: str = "") -> list[str]:
    """Every option's dotted name."""
    found = []
    for field in fields(schema):
        kind = typing.get_type_hints(schema)[field.name]
        found += option_names(kind, f"{prefix}{field.name}.") if is_dataclass(kind) else [prefix + field.name]
    return found


def group_choices(group: str, folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def help_text(program: str, about: str | None, schema: type) -> str:
    lines = [
        *([about.strip(), ""] if about else []),
        USAGE.format(program=program),
        "",
        "Options, with what a run takes if nothing else chooses:",
    ]
    single = [f for f in fields(schema) if not is_dataclass(typing.get_type_hints(schema)[f.name])]
    lines += ["", *_option_lines(single, "")]
    for field in fields(schema):
        kind = typing.get_type_hints(schema)[field.name]
        if is_dataclass(kind):
            chosen = ", ".join(group_choices(field.name, [CONF]))
            lines += ["", f"{field.name}: {field.metadata['help']}  ({field.name}= {chosen})"]
            lines += _option_lines(fields(kind), field.name + ".")
            if kind is Data:
                lines += ["", "data.sources.NAME: a part of the mixture", *_option_lines(fields(Source), "data.sources.NAME.")]
    lines += ["", "experiment= " + ", ".join(group_choices("experiment", [CONF]))]
    return "\n".join(lines)


def _option_lines(options: Any, prefix: str) -> list[str]:
    lines = []
    for option in options:
        choices = option.metadata.get("choices")
        among = f" ({', '.join(map(str, choices))})" if choices else ""
        lines.append(f"  {prefix}{option.name}={default_of(option)}\n      {option.metadata['help']}{among}")
    return lines


def default_of(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest_key(key: str, groups: list[str]) -> str:
    """Wrong in its group, in its name, or without its group: the last part says more than the whole."""
    known = option_names()
    if key in known:
        return ""
    name = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == name]
    same = same or [f"data.sources.NAME.{name}" for field in fields(Source) if field.name == name]
    near = same or difflib.get_close_matches(key, known, 3, 0.75)
    if not near:
        names = difflib.get_close_matches(name, {other.rpartition(".")[2] for other in known}, 2, 0.7)
        near = [other for other in known if other.rpartition(".")[2] in names]
    near = near or difflib.get_close_matches(key, [*known, *groups], 3, 0.6)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


PLAINLY = {  # what OmegaConf says of a value of the wrong type
    r"Value (?P<value>.*) of type '\w+' could not be converted to Float": "{value} is not a number",
    r"Value (?P<value>.*) of type '\w+' could not be converted to Integer": "{value} is not a whole number",
    r"Value (?P<value>.*) is not a valid bool .*": "{value} is neither true nor false",
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.": "this is not a list, which is written [a,b]",
}


def first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    line = lines[1] if len(lines) > 1 and lines[0].endswith("raised while composing config:") else lines[0]
    for said, plainly in PLAINLY.items():
        if match := re.fullmatch(said, line):
            return plainly.format(**match.groupdict())
    return line


def explain(error: BaseException, overrides: list[str], folders: list[Path]) -> str:
    """Hydra's complaint with the key and the argument or file it came from."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    key = next((str(e.full_key) for e in reversed(chain) if getattr(e, "full_key", None)), "")
    key = key or next(iter(re.findall(r"full_key: (\S+)", str(error))), "")
    text = first_line(error)
    argument = next((o for o in overrides if o.lstrip("+").partition("=")[0] == key), None)
    if argument is None:  # a value of a list or dict that was given whole
        argument = next((o for o in overrides if key.startswith(o.partition("=")[0]) and "." in o.partition("=")[0]), None)
    if argument is not None:
        return f"{argument}: {text}"
    files = [path for folder in folders for path in sorted(folder.rglob("*.yaml")) if _holds(path, folder, key)]
    where = " or ".join(str(path) for path in files[:2])
    near = nearest_key(key, []) if "not in" in text else ""
    return f"{key or 'the config'}{f' in {where}' if where else ''}: {text}{near}"


def _holds(path: Path, folder: Path, key: str) -> bool:
    """Whether a YAML file sets this key, by its place in conf/ or from the root if it is `@package _global_`."""
    text = path.read_text()
    group = path.parent.relative_to(folder).as_posix().replace("/", ".")
    prefix = "" if group == "." or "@package _global_" in text else group + "."
    try:
        node: Any = OmegaConf.to_container(OmegaConf.create(text))
    except Exception:
        return str(path) in key or not key
    if not key.startswith(prefix):
        return False
    for part in key.removeprefix(prefix).split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
