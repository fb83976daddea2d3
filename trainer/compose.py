"""From a command line to a checked Config, or to one screen that says what is wrong with it. Imports no torch.

Hydra composes conf/ on every rank from the same arguments; `@hydra.main` is not used, because it would give each rank a
run directory of its own. Every mistake is a ConfigError: the key, the argument or file it came from, the nearest right key.
"""

import difflib
import functools
import itertools
import os
import re
import sys
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from . import rules
from .config import Config, Data, Source

CONF = Path(__file__).resolve().parent.parent / "conf"
FLAGS = ["--help", "--cfg", "--config-dir", "--multirun", "--ranks"]
USAGE = """usage: {program} [key=value | group=choice | experiment=name] …

  --help             this page            --cfg job          print the config that results, and stop
  --config-dir=DIR   YAML of your own, in folders named like conf/'s
  --ranks=N          python -m launch: how many ranks to start (one for each GPU; 2 without)
  --multirun         python -m launch: key=a,b starts one run after the other"""


class ConfigError(ValueError):
    """What a user asked for cannot be. Its text is all that is shown."""


@dataclass
class Composed:
    config: Config
    overrides: list[str]
    yaml: str


def main(
    program: str, about: str | None, argv: list[str] | None = None, world_size: int | None = None, planning: bool = False
) -> Composed:
    """The config of a command line; --help and --cfg print and stop, a mistake ends the program with exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        flags, overrides = split(argv)
        if "help" in flags:
            print(help_text(program, about, Config))
            raise SystemExit(0)
        composed = load(overrides, flags.get("config-dir"), world_size, planning)
        if "cfg" in flags:
            print(composed.yaml, end="")
            raise SystemExit(0)
        return composed
    except ConfigError as error:
        fail(program, error)


def fail(program: str, error: Exception) -> NoReturn:
    if int(os.environ.get("RANK", 0)) == 0:  # once, not once a rank
        print(f"{program}: {error}\n`{program} --help` lists every option.", file=sys.stderr, flush=True)
    raise SystemExit(2)


def load(
    overrides: list[str], config_dir: str | None = None, world_size: int | None = None, planning: bool = False
) -> Composed:
    """Composes, checks types and contradictions. `world_size` is torchrun's, if not given; see rules.check."""
    parsed = [_parse(text) for text in overrides]
    folders = [CONF]
    if config_dir is not None:
        folders.insert(0, Path(config_dir).resolve())
        if not folders[0].is_dir():
            raise ConfigError(f"--config-dir={config_dir}: there is no such folder")
    for override in parsed:
        _check_key(override, folders)
    ConfigStore.instance().store("schema", Config)
    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[:-1])}]"] if len(folders) > 1 else []
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            tree = compose("config", [o.input_line for o in parsed if not _is_source(o)] + search)
        _set_sources(tree, [override for override in parsed if _is_source(override)])
        OmegaConf.resolve(tree)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, folders)) from None
    assert isinstance(config, Config)
    problems = rules.check(config, int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size, planning)
    if problems:
        raise ConfigError("\n".join(problems))
    return Composed(config, overrides, OmegaConf.to_yaml(tree))


def parse_flat(schema: type, program: str, about: str | None, argv: list[str] | None = None) -> Any:
    """For small commands: `key=value` into one dataclass, with the same errors and the same --help."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if "--help" in argv or "-h" in argv:
            lines = [f"  {f.name}={_default(f)}  {f.metadata['help']}" for f in fields(schema)]
            print("\n".join([f"usage: {program} key=value …", *([about, ""] if about else [""]), *lines]))
            raise SystemExit(0)
        node = OmegaConf.structured(schema)
        for text in argv:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} is not an option: write key=value")
            if key not in node:
                raise ConfigError(f"{key}: there is no such option{_nearest(key, [f.name for f in fields(schema)])}")
            try:
                # Text is taken as it is: a prompt may look like YAML.
                node[key] = value if isinstance(node[key], str) else OmegaConf.from_dotlist([text])[key]
            except OmegaConfBaseException as error:
                raise ConfigError(f"{text}: {_first_line(error)}") from None
        given = OmegaConf.to_object(node)
        problems = rules.check_values(given)
        if problems:
            raise ConfigError("\n".join(problems))
        return given
    except ConfigError as error:
        fail(program, error)


def sweep(overrides: list[str]) -> list[list[str]]:
    """The jobs of `a=1,2 b=3,4`: every combination, in order."""
    choices = []
    for override in map(_parse, overrides):
        key = override.input_line.partition("=")[0]
        values = [f"{key}={value}" for value in override.sweep_string_iterator()] if override.is_sweep_override() else None
        choices.append(values or [override.input_line])
    return [list(job) for job in itertools.product(*choices)]


@functools.cache
def option_names(schema: type = Config, prefix: str = "") -> list[str]:
    """Every option's dotted name."""
    found = []
    for field in fields(schema):
        kind = typing.get_type_hints(schema)[field.name]
        found += option_names(kind, f"{prefix}{field.name}.") if is_dataclass(kind) else [prefix + field.name]
    return found


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
            chosen = ", ".join(_choices(field.name, [CONF]))
            lines += ["", f"{field.name}: {field.metadata['help']}  ({field.name}= {chosen})"]
            lines += _option_lines(fields(kind), field.name + ".")
            if kind is Data:
                lines += ["", "data.sources.NAME: a part of the mixture", *_option_lines(fields(Source), "data.sources.NAME.")]
    lines += ["", "experiment= " + ", ".join(_choices("experiment", [CONF]))]
    return "\n".join(lines)


def _option_lines(options: Any, prefix: str) -> list[str]:
    lines = []
    for option in options:
        choices = option.metadata.get("choices")
        among = f" ({', '.join(map(str, choices))})" if choices else ""
        lines.append(f"  {prefix}{option.name}={_default(option)}\n      {option.metadata['help']}{among}")
    return lines


def _default(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    return str(value).lower() if isinstance(value, bool) else str(value)


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Flags by name, and what sets options."""
    flags: dict[str, str] = {}
    overrides = []
    rest = iter(argv)
    for text in rest:
        name, _, value = text.partition("=")
        if name in ("--help", "-h"):
            flags["help"] = ""
        elif name in ("--cfg", "-c"):
            if (value or next(rest, "")) != "job":
                raise ConfigError("--cfg takes job: it prints the config of the run")
            flags["cfg"] = "job"
        elif name == "--config-dir":
            flags["config-dir"] = value or next(rest, "")
            if not flags["config-dir"]:
                raise ConfigError("--config-dir takes a folder: --config-dir=DIR")
        elif name == "--ranks":
            raise ConfigError(f"{text}: ranks are started by the launcher: python -m launch --ranks=N …")
        elif name in ("--multirun", "-m"):
            raise ConfigError(
                "--multirun starts one run after the other, so it belongs to the launcher: python -m launch --multirun …"
            )
        elif text.startswith("-") and (bare := name.lstrip("-")) in option_names():
            raise ConfigError(f"{text}: there is no such flag; options are written without dashes: {bare}={value or '…'}")
        elif text.startswith("-"):
            raise ConfigError(f"{text}: there is no such flag{_nearest(name, FLAGS)}; options are written key=value")
        else:
            overrides.append(text)
    return flags, overrides


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        hint = "quote what has spaces, commas or brackets: 'name=\"a, b\"'" if "=" in text else "write key=value"
        raise ConfigError(f"{text!r} is not an option: {hint}") from None


def _is_source(override: Override) -> bool:
    return override.key_or_group.startswith("data.sources.")


def _set_sources(tree: Any, overrides: list[Override]) -> None:
    """A source of one's own needs no +: data.sources.mine.kind=text. Hydra's + would not give it the schema."""
    for override in overrides:
        name, _, rest = override.key_or_group.removeprefix("data.sources.").partition(".")
        with open_dict(tree.data.sources):
            if override.is_delete():
                tree.data.sources.pop(name)
                continue
            if name not in tree.data.sources:
                tree.data.sources[name] = OmegaConf.structured(Source)
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=bool(rest))


def _choices(group: str, folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _check_key(override: Override, folders: list[Path]) -> None:
    key, text = override.key_or_group, override.input_line
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: several values are a sweep, which python -m launch --multirun runs one by one; a list is written [a,b]"
        )
    if key.startswith("hydra"):
        raise ConfigError(f"{text}: hydra's own options have no meaning here; the run's folder is set by `runs` and `name`")
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    if _is_source(override):
        rest = key.removeprefix("data.sources.").partition(".")[2]
        options = [field.name for field in fields(Source)]
        if rest and rest not in options:
            raise ConfigError(f"{text}: a source has no option {rest}{_nearest(rest, options)}")
        return
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise ConfigError(
            f"{text}: options are neither added nor removed, so leave out the {text[0]}{_nearest_key(key, groups)}"
        )
    if key in groups and not isinstance(override.value(), dict):
        value, available = str(override.value()), _choices(key, folders)
        if value not in available and not (key == "experiment" and override.value() is None):
            raise ConfigError(f"{text}: conf/{key} has no {value}{_nearest(value, available)}\n  {key}= {', '.join(available)}")
        return
    known = option_names()
    if key in known or (key in groups and key != "experiment"):
        return
    raise ConfigError(f"{text}: there is no option {key}{_nearest_key(key, groups)}")


def _nearest_key(key: str, groups: list[str]) -> str:
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


def _nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


PLAINLY = {  # what OmegaConf says of a value of the wrong type
    r"Value (?P<value>.*) of type '\w+' could not be converted to Float": "{value} is not a number",
    r"Value (?P<value>.*) of type '\w+' could not be converted to Integer": "{value} is not a whole number",
    r"Value (?P<value>.*) is not a valid bool .*": "{value} is neither true nor false",
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.": "this is not a list, which is written [a,b]",
}


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    line = lines[1] if len(lines) > 1 and lines[0].endswith("raised while composing config:") else lines[0]
    for said, plainly in PLAINLY.items():
        if match := re.fullmatch(said, line):
            return plainly.format(**match.groupdict())
    return line


def _explain(error: BaseException, overrides: list[str], folders: list[Path]) -> str:
    """Hydra's complaint with the key and the argument or file it came from."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    key = next((str(e.full_key) for e in reversed(chain) if getattr(e, "full_key", None)), "")
    key = key or next(iter(re.findall(r"full_key: (\S+)", str(error))), "")
    text = _first_line(error)
    argument = next((o for o in overrides if o.lstrip("+").partition("=")[0] == key), None)
    if argument is None:  # a value of a list or dict that was given whole
        argument = next((o for o in overrides if key.startswith(o.partition("=")[0]) and "." in o.partition("=")[0]), None)
    if argument is not None:
        return f"{argument}: {text}"
    files = [path for folder in folders for path in sorted(folder.rglob("*.yaml")) if _holds(path, folder, key)]
    where = " or ".join(str(path) for path in files[:2])
    near = _nearest_key(key, []) if "not in" in text else ""
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
