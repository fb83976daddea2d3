"""Configs from files that anyone may have written: a run's config.yaml, and the model that a checkpoint describes.

YAML aliases are refused, because nine lines of them expand to 9⁹ items. So are interpolations: `${oc.env:NAME}` would copy an
environment variable, possibly a secret, into results. Types are those of the schema. Imports no torch.
"""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringspan.trainer import files

MAX_YAML = 2**20  # bytes; the longest config of a run has a few thousand
MAX_DEPTH = 20  # a config has 5 levels; the time to parse YAML grows with the square of the depth


def read_yaml(path: Path) -> Any:
    """Read a YAML file into dictionaries and lists.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no YAML, too large, nested too deep, or has aliases or interpolations.
    """
    try:
        text = files.read(path, MAX_YAML).decode()
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                raise ValueError(f"YAML aliases, and more than {MAX_DEPTH} levels, are not read; write the values out")
        tree = OmegaConf.create(text)
        content = OmegaConf.to_container(tree, resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not a config of this version: {_first_line(error)}") from None
    _refuse_interpolations(content, str(path))
    return content


def to_schema(schema: type, content: Any, where: str) -> Any:
    """Return an instance of a dataclass with the values of `content`; others have their default.

    Args:
        schema: a dataclass of the config.
        content: dictionaries and lists.
        where: file or key that has the content, for messages.
    Raises:
        ValueError: an unknown name, another type, or an interpolation.
    """
    _refuse_interpolations(content, where)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), content))
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a config of this version: {_first_line(error)}") from None


def _refuse_interpolations(content: Any, where: str) -> None:
    stack = [("", content)]
    while stack:
        key, node = stack.pop()
        if isinstance(node, str) and "${" in node:
            raise ValueError(f"{where}: {key.lstrip('.')} has an interpolation, ${{…}}, which is not resolved; write the value")
        if isinstance(node, dict):
            stack += [(f"{key}.{name}", item) for name, item in node.items()]
        elif isinstance(node, list):
            stack += [(key, item) for item in node]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
