"""Composes a command line into a validated Config, or reports every mistake in it. Imports no torch.

    arguments → flags and overrides → Hydra composes conf/ → types → validate.py → Composed(config, overrides, yaml)

Each rank composes conf/ from the same arguments. `@hydra.main` is not used, because it gives each rank its own run directory.
Every mistake is a ConfigError with the key, the argument or file that set it, and the nearest valid key.
"""

import itertools
import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

try:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'ringspan.trainer.config.compose needs the package {error.name}: pip install "ringspan[train]"', name=error.name
    ) from error

from ringspan.trainer.checkpoint.huggingface_config import MODEL_FROM, model_overrides
from ringspan.trainer.config import rank_variables, validate
from ringspan.trainer.config.help import (
    CONF,
    RETIRED,
    default_of,
    explain,
    first_line,
    group_choices,
    help_text,
    nearest,
    nearest_key,
    option_names,
    retired,
    text_options,
)
from ringspan.trainer.config.schema import Config, Source

FLAGS = ["--help", "--cfg", "--config-dir", "--multirun", "--ranks"]
NUMBER = r"[+-]?(?:[\d.][\d._]*(?:e[+-]?[\d_]+)?|inf|nan)|true|false"
QUOTED = r"""'(?:\\.|[^'])*'|"(?:\\.|[^"])*\""""
# A quoted text; or (begin of the value, or of an item of a list or sweep) and (number or bool) up to its end.
QUOTED_OR_NUMBER = re.compile(rf"{QUOTED}|((?:^|[\[,])\s*)({NUMBER})(?=\s*(?:[\],]|$))", re.IGNORECASE)
COUNT_TOKENS = ("data.length", "model.max_positions", "rope.original_length")


class ConfigError(ValueError):
    """A mistake in the user's options. Programs print only its text, without a traceback, and exit with its code."""

    exit_code = 2


@dataclass
class Composed:
    """A validated config, the overrides it was composed from, and its YAML text."""

    config: Config
    overrides: list[str]
    yaml: str


def main(
    program: str, about: str | None, argv: list[str] | None = None, world_size: int | None = None, planning: bool = False
) -> Composed:
    """Compose the config of a command line. Print and exit for --help and --cfg.

    Args:
        program: the command in messages, such as "ringspan train".
        about: text above the options of --help.
        argv: arguments; sys.argv[1:] if None.
        world_size: number of ranks; that of torchrun if None.
        planning: the config is for `ringspan check`, so its files and its machine may be absent.
    Raises:
        SystemExit: code 0 after --help or --cfg, code 2 after a mistake.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        flags, overrides = split_flags(argv)
        if "help" in flags:
            print(help_text(program, about, Config, overrides))
            raise SystemExit(0)
        composed = load(overrides, flags.get("config-dir"), world_size, planning)
        if "cfg" in flags:
            print(composed.yaml, end="")
            raise SystemExit(0)
        return composed
    except ConfigError as error:
        fail(program, error)


def fail(program: str, error: Exception) -> NoReturn:
    """Print an error on rank 0, and exit with its code, 2 for a wrong option, on every rank."""
    if rank_variables.is_first():
        print(f"{program}: {error}\n`{program} --help` lists every option.", file=sys.stderr, flush=True)
    raise SystemExit(getattr(error, "exit_code", 2))


def load(
    overrides: list[str], config_dir: str | None = None, world_size: int | None = None, planning: bool = False
) -> Composed:
    """Compose overrides and validate the result.

    Args:
        overrides: `key=value`, `group=choice` or `experiment=name`, without flags.
        config_dir: a folder of YAML groups that take precedence over conf/.
        world_size: number of ranks; that of torchrun if None.
        planning: see `main`.
    Raises:
        ConfigError: an unknown option, a wrong type, any problem that validate.py finds, or variables of another launcher.
    """
    if world_size is None:
        if problem := rank_variables.problem():
            raise ConfigError(problem)
        world_size = int(os.environ.get("WORLD_SIZE", 1))
    composed = _compose(overrides, config_dir)
    try:
        problems = validate.validate_config(composed.config, world_size, planning)
    except OSError as error:  # a path lies in a folder without search permission
        problems = [str(error)]
    if problems:
        raise ConfigError("\n".join(problems))
    return composed


def _compose(overrides: list[str], config_dir: str | None) -> Composed:
    """Compose overrides and check their types, without validate.py."""
    overrides = [_expand_suffix(text) for text in overrides]
    parsed = [_parse(text) for text in _expand_model_from(overrides)]
    folders = [CONF]
    if config_dir is not None:
        folders.insert(0, Path(config_dir).resolve())
        if not folders[0].is_dir():
            raise ConfigError(f"--config-dir={config_dir}: there is no such folder")
    for override in parsed:
        _validate_key(override, folders)
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
    """Parse `key=value` arguments of a small command into one dataclass, with the errors and --help of `main`.

    Args:
        schema: a dataclass of `option` fields.
        program, about, argv: see `main`.
    Returns:
        An instance of `schema`.
    Raises:
        SystemExit: code 0 after --help, code 2 after a mistake.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if "--help" in argv or "-h" in argv:
            lines = [f"  {f.name}={default_of(f)}  {f.metadata['help']}" for f in fields(schema)]
            print("\n".join([f"usage: {program} key=value …", *([about, ""] if about else [""]), *lines]))
            raise SystemExit(0)
        return set_options(schema, argv)
    except ConfigError as error:
        fail(program, error)


def set_options(options: Any, arguments: list[str]) -> Any:
    """Return an instance of a dataclass of `option` fields with `key=value` arguments.

    Args:
        options: the dataclass, or an instance that has the other values.
        arguments: one per option.
    Raises:
        ConfigError: a mistake in the arguments.
    """
    node = OmegaConf.structured(options)
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not an option: write key=value")
        if key not in node:
            raise ConfigError(f"{key}: there is no such option{nearest(key, [f.name for f in fields(options)])}")
        try:
            # Strings are not parsed, because a prompt may look like YAML.
            node[key] = value if isinstance(node[key], str) else OmegaConf.from_dotlist([text])[key]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{text}: {first_line(error)}") from None
    result = OmegaConf.to_object(node)
    if problems := validate.validate_values(result):
        raise ConfigError("\n".join(problems))
    return result


def sweep(overrides: list[str], config_dir: str | None = None) -> list[list[str]]:
    """Expand `a=1,2 b=3,4` into jobs: every combination, in order.

    A job leaves out an option that only other jobs use; jobs that become equal are merged. An option that no job uses stays
    in all jobs and is rejected as in a single run.

    Args:
        overrides, config_dir: see `load`; values may be Hydra sweeps.
    Returns:
        The overrides of each job.
    """
    choices = []
    for override in map(_parse, overrides):
        key = override.input_line.partition("=")[0]
        values = [f"{key}={value}" for value in override.sweep_string_iterator()] if override.is_sweep_override() else None
        choices.append(list(enumerate(values or [override.input_line])))
    jobs = list(itertools.product(*choices))
    unused = [set(validate.unused_options(_compose([text for _, text in job], config_dir).config)) for job in jobs]
    unused_by_all = set.intersection(*unused)
    reduced = (
        tuple((number, text) for number, text in job if text.partition("=")[0] not in job_unused - unused_by_all)
        for job, job_unused in zip(jobs, unused, strict=True)
    )
    return [[text for _, text in job] for job in dict.fromkeys(reduced)]


def split_flags(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split arguments into flags by name, and overrides of options."""
    flags: dict[str, str] = {}
    overrides = []
    arguments = iter(argv)
    for text in arguments:
        name, _, value = text.partition("=")
        if name in ("--help", "-h"):
            flags["help"] = ""
        elif name in ("--cfg", "-c"):
            if (value or next(arguments, "")) != "job":
                raise ConfigError("--cfg takes job: it prints the config of the run")
            flags["cfg"] = "job"
        elif name == "--config-dir":
            flags["config-dir"] = value or next(arguments, "")
            if not flags["config-dir"]:
                raise ConfigError("--config-dir takes a folder: --config-dir=DIR")
        elif name == "--ranks":
            raise ConfigError(f"{text}: the launcher starts ranks: ringspan launch --ranks=N …")
        elif name in ("--multirun", "-m"):
            raise ConfigError("--multirun runs jobs one after the other, which the launcher does: ringspan launch --multirun …")
        elif text.startswith("-") and (key := name.lstrip("-")) in option_names():
            raise ConfigError(f"{text}: there is no such flag; options are written without dashes: {key}={value or '…'}")
        elif text.startswith("-"):
            raise ConfigError(f"{text}: there is no such flag{nearest(name, FLAGS)}; options are written key=value")
        else:
            overrides.append(text)
    return flags, overrides


def _expand_suffix(text: str) -> str:
    """Expand 128k to 131072 and 1M or 1m to 1048576, in counts of tokens only: in `steps`, k could mean 1000. Quote a plan."""
    key, _, value = text.partition("=")
    if key == "engine.memory" and " " in value and not value.startswith(("'", '"')):
        return f"{key}='{value}'"
    match = re.fullmatch(rf"((?:{'|'.join(COUNT_TOKENS)})=\d+)([kKmM])", text)
    if match is None:
        return text
    key, _, number = match[1].partition("=")
    return f"{key}={int(number) * 1024 ** (2 if match[2] in 'mM' else 1)}"


def _expand_model_from(overrides: list[str]) -> list[str]:
    """Replace model.from=FOLDER by the options that it stands for, except those that are written out."""
    folders = [text.partition("=")[2] for text in overrides if text.startswith(f"{MODEL_FROM}=")]
    if not folders:
        return overrides
    rest = [text for text in overrides if not text.startswith(f"{MODEL_FROM}=")]
    keys = {text.partition("=")[0] for text in rest}
    if len(folders) > 1 or "model" in keys:
        raise ConfigError(f"{MODEL_FROM}={folders[0]}: the model's shape is set twice; leave out model= or the other folder")
    if not folders[0]:
        raise ConfigError(f"{MODEL_FROM}=: it takes a folder in Hugging Face's format, with a config.json")
    try:
        pairs = model_overrides(folders[0].strip("'\""))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return [*rest, *(f"{key}={value}" for key, value in pairs if key not in keys and key.partition(".")[0] not in keys)]


def _quote_numbers(text: str) -> str:
    """Quote what Hydra's grammar takes for numbers and bools in an option that is a text: name=1e3 would be 1000.0."""
    key, equals, value = text.partition("=")
    name = re.sub(r"^data\.sources\.[^.]+\.", "data.sources.", key)
    if name not in text_options() or re.match(r"\w+\(", value):  # choice(…) and other functions
        return text
    return key + equals + QUOTED_OR_NUMBER.sub(lambda match: f"{match[1]}'{match[2]}'" if match[2] else match[0], value)


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(_quote_numbers(text))
    except HydraException:
        hint = "quote values with spaces, commas or brackets: 'name=\"a, b\"'" if "=" in text else "write key=value"
        raise ConfigError(f"{text!r} is not an option: {hint}") from None


def _is_source(override: Override) -> bool:
    return override.key_or_group.startswith("data.sources.")


def _set_sources(tree: Any, overrides: list[Override]) -> None:
    """Apply overrides of data.sources. A new source needs no +, which would bypass the schema in Hydra."""
    for override in overrides:
        name, _, option = override.key_or_group.removeprefix("data.sources.").partition(".")
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
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=bool(option))


def _validate_key(override: Override, folders: list[Path]) -> None:
    """Raise a ConfigError if an override names no option, group, choice or source."""
    key, text = override.key_or_group, override.input_line
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: several values are a sweep; run it with ringspan launch --multirun, or write a list as [a,b]"
        )
    if key.startswith("hydra"):
        raise ConfigError(f"{text}: hydra's own options have no effect; set the run's folder with `runs` and `name`")
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    if _is_source(override):
        option = key.removeprefix("data.sources.").partition(".")[2]
        options = [field.name for field in fields(Source)]
        if option and option not in options:
            raise ConfigError(f"{text}: a source has no option {option}{nearest(option, options)}")
        if option and override.is_delete():
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
    if key in option_names() or (key in groups and key != "experiment"):
        return
    if key in RETIRED:
        raise ConfigError(f"{text}: {retired(key)}")
    raise ConfigError(f"{text}: there is no option {key}{nearest_key(key, groups)}")
