"""From a command line to a checked Config, or to one screen that says what is wrong with it. Imports no torch.

Hydra composes conf/ on every rank from the same arguments; `@hydra.main` is not used, because it would give each rank a
run directory of its own. Every mistake is a ConfigError: the key, the argument or file it came from, the nearest right key.
"""

import itertools
import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ringspan.trainer.config import validate
from ringspan.trainer.config.help import (
    CONF,
    default_of,
    explain,
    first_line,
    group_choices,
    help_text,
    nearest,
    nearest_key,
    option_names,
)
from ringspan.trainer.config.schema import Config, Source

FLAGS = ["--help", "--cfg", "--config-dir", "--multirun", "--ranks"]
COUNT_TOKENS = ("data.length", "model.max_positions", "rope.original_length")


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
    """Composes, checks types and contradictions. `world_size` is torchrun's, if not given; see validate.check."""
    composed = _composed(overrides, config_dir)
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
    try:
        problems = validate.check(composed.config, world_size, planning)
    except OSError as error:  # what it names lies in a folder that may not be looked into
        problems = [str(error)]
    if problems:
        raise ConfigError("\n".join(problems))
    return composed


def _composed(overrides: list[str], config_dir: str | None) -> Composed:
    """With types checked, and nothing else yet."""
    overrides = [_in_full(text) for text in overrides]
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
        raise ConfigError(explain(error, overrides, folders)) from None
    assert isinstance(config, Config)
    return Composed(config, overrides, OmegaConf.to_yaml(tree))


def parse_flat(schema: type, program: str, about: str | None, argv: list[str] | None = None) -> Any:
    """For small commands: `key=value` into one dataclass, with the same errors and the same --help."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if "--help" in argv or "-h" in argv:
            lines = [f"  {f.name}={default_of(f)}  {f.metadata['help']}" for f in fields(schema)]
            print("\n".join([f"usage: {program} key=value …", *([about, ""] if about else [""]), *lines]))
            raise SystemExit(0)
        node = OmegaConf.structured(schema)
        for text in argv:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} is not an option: write key=value")
            if key not in node:
                raise ConfigError(f"{key}: there is no such option{nearest(key, [f.name for f in fields(schema)])}")
            try:
                # Text is taken as it is: a prompt may look like YAML.
                node[key] = value if isinstance(node[key], str) else OmegaConf.from_dotlist([text])[key]
            except OmegaConfBaseException as error:
                raise ConfigError(f"{text}: {first_line(error)}") from None
        given = OmegaConf.to_object(node)
        problems = validate.check_values(given)
        if problems:
            raise ConfigError("\n".join(problems))
        return given
    except ConfigError as error:
        fail(program, error)


def sweep(overrides: list[str], config_dir: str | None = None) -> list[list[str]]:
    """The jobs of `a=1,2 b=3,4`: every combination, in order.

    An option that some have a use for is left out of the others, and what then would be one job twice is one. What none has a
    use for stays in all, and is refused as it would be alone.
    """
    choices = []
    for override in map(_parse, overrides):
        key = override.input_line.partition("=")[0]
        values = [f"{key}={value}" for value in override.sweep_string_iterator()] if override.is_sweep_override() else None
        choices.append(list(enumerate(values or [override.input_line])))
    jobs = list(itertools.product(*choices))
    unused = [set(validate.unused(_composed([text for _, text in job], config_dir).config)) for job in jobs]
    of_none = set.intersection(*unused)
    left = (
        tuple((number, text) for number, text in job if text.partition("=")[0] not in without - of_none)
        for job, without in zip(jobs, unused, strict=True)
    )
    return [[text for _, text in job] for job in dict.fromkeys(left)]


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
            raise ConfigError(f"{text}: ranks are started by the launcher: ringspan launch --ranks=N …")
        elif name in ("--multirun", "-m"):
            raise ConfigError(
                "--multirun starts one run after the other, so it belongs to the launcher: ringspan launch --multirun …"
            )
        elif text.startswith("-") and (bare := name.lstrip("-")) in option_names():
            raise ConfigError(f"{text}: there is no such flag; options are written without dashes: {bare}={value or '…'}")
        elif text.startswith("-"):
            raise ConfigError(f"{text}: there is no such flag{nearest(name, FLAGS)}; options are written key=value")
        else:
            overrides.append(text)
    return flags, overrides


def _in_full(text: str) -> str:
    """128k tokens are 131072, and 1M are 1048576. Of anything else, steps say, a k would be read as 1000."""
    match = re.fullmatch(rf"((?:{'|'.join(COUNT_TOKENS)})=\d+)([kKM])", text)
    if match is None:
        return text
    key, _, number = match[1].partition("=")
    return f"{key}={int(number) * 1024 ** (2 if match[2] == 'M' else 1)}"


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
                if name not in tree.data.sources:
                    names = list(tree.data.sources)
                    raise ConfigError(
                        f"{override.input_line}: there is no source {name}{nearest(name, names)}\n"
                        f"  data.sources: {', '.join(names) or 'none'}"
                    )
                tree.data.sources.pop(name)
                continue
            if name not in tree.data.sources:
                tree.data.sources[name] = OmegaConf.structured(Source)
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=bool(rest))


def _check_key(override: Override, folders: list[Path]) -> None:
    key, text = override.key_or_group, override.input_line
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: several values are a sweep, which ringspan launch --multirun runs one by one; a list is written [a,b]"
        )
    if key.startswith("hydra"):
        raise ConfigError(f"{text}: hydra's own options have no meaning here; the run's folder is set by `runs` and `name`")
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    if _is_source(override):
        rest = key.removeprefix("data.sources.").partition(".")[2]
        options = [field.name for field in fields(Source)]
        if rest and rest not in options:
            raise ConfigError(f"{text}: a source has no option {rest}{nearest(rest, options)}")
        if rest and override.is_delete():
            raise ConfigError(f"{text}: options are not removed; set {key}= instead")
        return
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise ConfigError(
            f"{text}: options are neither added nor removed, so leave out the {text[0]}{nearest_key(key, groups)}"
        )
    if key in groups and not isinstance(override.value(), dict):
        value, available = str(override.value()), group_choices(key, folders)
        if value not in available and not (key == "experiment" and override.value() is None):
            raise ConfigError(f"{text}: conf/{key} has no {value}{nearest(value, available)}\n  {key}= {', '.join(available)}")
        return
    known = option_names()
    if key in known or (key in groups and key != "experiment"):
        return
    raise ConfigError(f"{text}: there is no option {key}{nearest_key(key, groups)}")
