"""Reads the config.json of a Hugging Face folder into our options of model and rope. Imports no torch.

model.from=Qwen3-0.6B        fills the options of model and rope; those on the command line take precedence
init_from=Qwen3-0.6B         also compares them with those of the run
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringspan.trainer import files
from ringspan.trainer.config.schema import Model, Rope

MODEL_FROM = "model.from"
INSTEAD = (
    "a model of another architecture trains in transformers or another trainer: ringspan.hf gives it ring attention "
    "(docs/guides/other-packages.md)"
)
ROPE_NAMES = {  # option of the group rope: key of config.json
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
ROPE_OPTIONS = {  # rope.kind: options it uses
    "base": [],
    "linear": ["factor"],
    "yarn": ["factor", "original_length", "beta_fast", "beta_slow", "attention_factor"],
    "llama3": ["factor", "original_length", "low_freq_factor", "high_freq_factor"],
}


class HFConfig(dict[str, Any]):
    """A config.json; a missing key raises a ValueError that names key and folder."""

    def __init__(self, *args: Any, source: str) -> None:
        super().__init__(*args)
        self.source = source

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.source} has no {key} in its config.json")


def model_overrides(text: str) -> list[tuple[str, str]]:
    """Return the options of model and rope that `model.from=text` stands for, as (key, value in Hydra's grammar).

    Args:
        text: a Hugging Face folder.
    Raises:
        ValueError: as `read_config`.
    """
    _, model, rope = read_config(Path(text).expanduser(), MODEL_FROM)
    pairs = [("model", model)] + [("rope", rope)] * (model.positions == "rope")
    return [(f"{group}.{field.name}", _quoted(getattr(node, field.name))) for group, node in pairs for field in fields(node)]


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_config(path: Path, option: str = "init_from") -> tuple[str, Model, Rope]:
    """Read a folder's config.json.

    Args:
        path: the folder.
        option: the option that names it, for messages.
    Returns:
        (family, model, rope), with family "llama", "qwen3" or "gpt2".
    Raises:
        ValueError: config.json is missing, or describes an unsupported model; the message names the key.
    """
    source = f"{option}={str(path)!r}"
    try:
        config = HFConfig(files.read_json(path / "config.json"), source=source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} has no config.json that can be read: {error}") from None
    family = config.get("model_type")
    if family == "gpt2":
        dim = config["n_embd"]
        model = Model(
            name=path.name,
            vocabulary=config["vocab_size"],
            layers=config["n_layer"],
            dim=dim,
            heads=config["n_head"],
            kv_heads=config["n_head"],
            mlp_dim=config.get("n_inner") or 4 * dim,
            norm="layernorm",
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
            positions="learned",
            max_positions=config["n_positions"],
            activation="gelu",
            bias=True,
            tied=config.get("tie_word_embeddings", True),
        )
        _validate(source, config, activation_function=("gelu_new", "gelu_pytorch_tanh"), tie_word_embeddings=(True,))
        _validate(source, config, scale_attn_by_inverse_layer_idx=(False,), scale_attn_weights=(True,))
        return family, model, Rope()
    if family not in ("llama", "qwen3"):
        raise ValueError(f"{source} is a model of type {family}: llama, qwen3 and gpt2 are supported; {INSTEAD}")
    _validate(source, config, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,), use_sliding_window=(False,))
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{source} has layers of types {config['layer_types']}; only full_attention is supported")
    model = Model(
        name=path.name,
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        dim=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        mlp_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        qk_norm=family == "qwen3",
        tied=config.get("tie_word_embeddings", False),
    )
    # transformers 5 writes rope_parameters; earlier versions write rope_theta and rope_scaling.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return family, model, _read_rope(source, scaling, config)


def _read_rope(source: str, scaling: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "base" if kind == "default" else kind
    if kind not in ROPE_OPTIONS:
        raise ValueError(f"{source} has rotary positions of type {kind}: default, linear, yarn and llama3 are supported")
    known = {*ROPE_NAMES.values(), "rope_type", "type", "rope_theta"}
    neutral = {"partial_rotary_factor": 1.0, "truncate": True}
    unsupported = {name: x for name, x in scaling.items() if name not in known and x is not None and neutral.get(name) != x}
    if unsupported:
        raise ValueError(f"{source} has rotary options that are not supported: {unsupported}")
    base = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
    options = {name: scaling[ROPE_NAMES[name]] for name in ROPE_OPTIONS[kind] if scaling.get(ROPE_NAMES[name]) is not None}
    if kind == "yarn":
        options.setdefault("original_length", config.get("max_position_embeddings"))
    return Rope(kind=kind, base=float(base), **options)


def _validate(source: str, config: Mapping[str, Any], **choices: tuple[Any, ...]) -> None:
    for name, supported in choices.items():
        if config.get(name, supported[0]) not in supported:
            raise ValueError(f"{source} has {name}={config[name]!r} in its config.json; {supported[0]!r} is supported")
