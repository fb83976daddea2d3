"""What a checkpoint's weights and sample numbers mean: the options that state.json keeps, compared with a run's on resume.

A checkpoint of another number of heads, epsilon, window, rotary base or data mixture can have the same shapes. Continuing it
with such an option changed is an error, unless `checkpoint.changed` names the option or a group of options. Options that only
direct the training, such as optim and data.batch, may change. So may paths of files: a data set may move. Imports no torch.
"""

from dataclasses import asdict
from typing import Any

from ringspan.trainer.config.mixture import only_shards
from ringspan.trainer.config.schema import Config, Model, Rope, Source, TokenizerOptions

MODEL_FREE = ("name", "init_std", "dropout")  # they do not change what trained weights compute
TOKENIZER = ("kind", "begin", "end")
SECTIONS = (  # (key of state.json, the options that it holds)
    ("model", "model."), ("rope", "rope."), ("tokenizer", "tokenizer."), ("length", "data.length"), ("data", "data.held_out"),
    ("data", "data.packing"), ("data", "data.sources"), ("data", "seed"),
)  # fmt: skip
WEIGHTS = ("model.", "rope.", "tokenizer.")  # of these options depends what weights mean; of the others, sample numbers


def describe(config: Config, model: Model) -> dict[str, Any]:
    """Return what state.json keeps of a config.

    Args:
        config: the run's config.
        model: its model, with vocabulary and positions resolved.
    """
    described: dict[str, Any] = dict(model=asdict(model), rope=asdict(config.rope), tokenizer=asdict(config.tokenizer))
    described |= dict(length=config.data.length, tokens=only_shards(config.data) and config.tokenizer.kind == "bytes")
    sources = {name: {k: v for k, v in asdict(source).items() if k != "paths"} for name, source in config.data.sources.items()}
    data = dict(sources=sources, held_out=config.data.held_out, packing=config.data.packing, seed=config.seed)
    return described | dict(data=data)


def differences(saved: dict[str, Any], current: dict[str, Any], weights_only: bool = False) -> dict[str, str]:
    """Return the options that change the meaning of a checkpoint, each with its two values.

    Args:
        saved: `describe` of the run that made the checkpoint; older versions lack some of it, which is not compared.
        current: `describe` of this run.
        weights_only: compare what weights mean, and not the data.
    Returns:
        {option: "option=current (there value)"}, sorted.
    """
    old, new = _options(saved), _options(current)
    known = [prefix for key, prefix in SECTIONS if saved.get(key)]
    return {
        key: f"{key}={new.get(key, 'absent')} (there {old.get(key, 'absent')})"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and key.startswith(WEIGHTS if weights_only else ("",)) and key.startswith(tuple(known))
    }


def unscaled_positions(saved: Any, config: Config) -> str:
    """Return a warning if a run is longer than the one whose weights it takes, and no rope rule scales its positions; else "".

    Args:
        saved: `describe` of the run that made the weights.
        config: this run's config.
    """
    trained, length = _mapping(saved).get("length"), config.data.length
    scales = config.rope.kind != "base" or config.model.positions != "rope"
    if type(trained) is not int or not 0 < trained < length or scales:
        return ""
    return (
        f"it was trained at {trained} tokens, and rope.kind=base scales no positions for data.length={length}; "
        f"rope=yarn rope.factor={-(-length // trained)} rope.original_length={trained} checkpoint.changed=[rope] does"
    )


def is_accepted(key: str, changed: list[str]) -> bool:
    """Whether `checkpoint.changed` names an option, or a group that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in changed)


def names(config: Config) -> list[str]:
    """Return every option and group that `checkpoint.changed` may name."""
    options = {*_options(describe(config, config.model)), "data.sources"}
    groups = {key.rpartition(".")[0] for key in options} - {""}
    return sorted(options | groups)


def _options(described: dict[str, Any]) -> dict[str, Any]:
    """The compared options by name. What state.json lacks, or holds as another type, is left out or equals nothing."""
    model, rope, tokenizer, data = (_mapping(described.get(key)) for key in ("model", "rope", "tokenizer", "data"))
    options: dict[str, Any] = {}
    if model:
        model = asdict(Model()) | model
        options |= {f"model.{key}": value for key, value in model.items() if key not in MODEL_FREE}
        layers, windows = options["model.layers"], options["model.windows"]
        if isinstance(layers, int) and isinstance(windows, list) and len(windows) <= layers:
            options["model.windows"] = [windows[i % len(windows)] for i in range(layers)] if any(windows) else []
        if isinstance(model["heads"], int) and isinstance(model["dim"], int) and model["heads"] > 0:
            options["model.head_dim"] = model["head_dim"] or model["dim"] // model["heads"]
    if rope and model and model.get("positions") == "rope":
        options |= {f"rope.{key}": value for key, value in (asdict(Rope()) | rope).items()}
    if tokenizer:
        options |= {f"tokenizer.{key}": (asdict(TokenizerOptions()) | tokenizer).get(key) for key in TOKENIZER}
    if "length" in described:
        options["data.length"] = described["length"]
    if data:
        options |= {"data.held_out": data.get("held_out"), "seed": data.get("seed")}
        options["data.packing"] = data.get("packing", "stream")
        for name, source in _mapping(data.get("sources")).items():
            values = asdict(Source()) | _mapping(source)
            options |= {f"data.sources.{name}.{key}": value for key, value in values.items() if key != "paths"}
    return options


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
