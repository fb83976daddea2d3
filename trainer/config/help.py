"""The --help screen, and messages that explain a wrong option, for compose.py. Imports no torch."""

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
# Options of earlier versions, and what replaces them.
RETIRED = {
    "engine.activations": "leave it out for engine.memory=auto, or take none, least, "
    "'x/1 outs=LAYERS' (was attention) or 'x/1' (was full), with LAYERS the number of the model's layers",
    "engine.offload_activations": "engine.memory=auto uses host memory where a plan needs it; "
    "'x/1@LAYERS' keeps the inputs of all layers there, with LAYERS the number of the model's layers",
}
USAGE = """usage: {program} [key=value | group=choice | experiment=name] …

  --help             show this page       --cfg job          print the composed config and exit
  --config-dir=DIR   additional YAML files, in folders named like those of conf/
  --ranks=N          ringspan launch: number of ranks to start (default: one per GPU, or 2 without a GPU)
  --multirun         ringspan launch: key=a,b starts one run after the other"""


@functools.cache
def option_names(schema: type = Config, prefix: str = "") -> list[str]:
    """Return the dotted name of every option."""
    names = []
    for field in fields(schema):
        kind: Any = typing.get_type_hints(schema)[field.name]
        is_group = is_dataclass(kind)
        names += option_names(kind, f"{prefix}{field.name}.") if is_group else [prefix + field.name]
    return names


def group_choices(group: str, folders: list[Path]) -> list[str]:
    """Return the choices of a group: the names of its YAML files."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def help_text(program: str, about: str | None, schema: type) -> str:
    """Return the --help screen: usage, then every option with its default, help and choices."""
    lines = [
        *([about.strip(), ""] if about else []),
        USAGE.format(program=program),
        "",
        "Options, with their defaults:",
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
                lines += [
                    "",
                    "data.sources.NAME: one source of the mixture",
                    *_option_lines(fields(Source), "data.sources.NAME."),
                ]
    lines += ["", "experiment= " + ", ".join(group_choices("experiment", [CONF]))]
    return "\n".join(lines)


def _option_lines(options: Any, prefix: str) -> list[str]:
    lines = []
    for option in options:
        choices = option.metadata.get("choices")
        suffix = f" ({', '.join(map(str, choices))})" if choices else ""
        lines.append(f"  {prefix}{option.name}={default_of(option)}\n      {option.metadata['help']}{suffix}")
    return lines


def default_of(field: Any) -> str:
    """Return the default of an option as a user would write it."""
    value = field.default if field.default is not MISSING else field.default_factory()
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest_key(key: str, groups: list[str]) -> str:
    """Return "; did you mean …?" with the options nearest to a wrong key; "" if there are none.

    The last part of a key is compared first: a missing or wrong group is the most common mistake.
    """
    options = option_names()
    if key in options:
        return ""
    name = key.rpartition(".")[2]
    same_name = [option for option in options if option.rpartition(".")[2] == name]
    same_name = same_name or [f"data.sources.NAME.{name}" for field in fields(Source) if field.name == name]
    matches = same_name or difflib.get_close_matches(key, options, 3, 0.75)
    if not matches:
        names = difflib.get_close_matches(name, {option.rpartition(".")[2] for option in options}, 2, 0.7)
        matches = [option for option in options if option.rpartition(".")[2] in names]
    matches = matches or difflib.get_close_matches(key, [*options, *groups], 3, 0.6)
    return f"; did you mean {' or '.join(matches[:3])}?" if matches else ""


def nearest(word: str, words: list[str]) -> str:
    """Return "; did you mean …?" with the word nearest to a wrong one; "" if there is none."""
    matches = difflib.get_close_matches(word, words, 1, 0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def retired(key: str) -> str:
    """Return what replaces an option of an earlier version."""
    return f"engine.memory replaces this option; {RETIRED[key]}"


TYPE_ERRORS = {  # OmegaConf's message for a value of the wrong type: ours
    r"Value (?P<value>.*) of type '\w+' could not be converted to Float": "{value} is not a number",
    r"Value (?P<value>.*) of type '\w+' could not be converted to Integer": "{value} is not a whole number",
    r"Value (?P<value>.*) is not a valid bool .*": "{value} is neither true nor false",
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.": "this is not a list; write a list as [a,b]",
}


def first_line(error: BaseException) -> str:
    """Return the first informative line of an OmegaConf or Hydra error, in plain words if its pattern is known."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    line = lines[1] if len(lines) > 1 and lines[0].endswith("raised while composing config:") else lines[0]
    for pattern, message in TYPE_ERRORS.items():
        if match := re.fullmatch(pattern, line):
            return message.format(**match.groupdict())
    return line


def explain(error: BaseException, overrides: list[str], folders: list[Path]) -> str:
    """Return a Hydra error as one message: the argument or file that set the key, and the reason."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    full_keys = (getattr(e, "full_key", None) for e in reversed(chain))
    key = next((str(full_key) for full_key in full_keys if full_key), "")
    key = key or next(iter(re.findall(r"full_key: (\S+)", str(error))), "")
    text = first_line(error)
    argument = next((o for o in overrides if o.lstrip("+").partition("=")[0] == key), None)
    if argument is None:  # the key lies inside a list or dict that an argument sets as a whole
        argument = next((o for o in overrides if key.startswith(o.partition("=")[0]) and "." in o.partition("=")[0]), None)
    if argument is not None:
        return f"{argument}: {text}"
    files = [path for folder in folders for path in sorted(folder.rglob("*.yaml")) if _sets_key(path, folder, key)]
    source = " or ".join(str(path) for path in files[:2])
    if key in RETIRED:
        return f"{key}{f' in {source}' if source else ''}: {retired(key)}"
    hint = nearest_key(key, []) if "not in" in text else ""
    return f"{key or 'the config'}{f' in {source}' if source else ''}: {text}{hint}"


def _sets_key(path: Path, folder: Path, key: str) -> bool:
    """Whether a YAML file sets this key, relative to its group or to the root (`@package _global_`)."""
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
