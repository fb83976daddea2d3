"""`model.from`: options of model and rope from a folder in Hugging Face's format, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer.checkpoint import huggingface_config
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config

QWEN = dict(
    model_type="qwen3", vocab_size=512, num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=96, rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6),
)  # fmt: skip
OPTIONS = ["experiment=laptop", "parallel.device=cpu"]


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN | changes))
    return path


def load(*options: str) -> Config:
    return compose.load([*OPTIONS, *options]).config


def test_the_folder_fills_model_and_rope_and_written_options_win(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "Qwen")
    config = load(f"model.from={folder}", "model.layers=2")
    assert (config.model.name, config.model.layers, config.model.dim, config.model.qk_norm) == ("Qwen", 2, 64, True)
    assert (config.rope.kind, config.rope.factor, config.rope.original_length, config.rope.base) == ("yarn", 4.0, 32768, 1e6)
    assert load(f"model.from={folder}", "rope=base").rope == load().rope
    assert load().model.name == "tiny"


@pytest.mark.parametrize(
    ("changes", "option", "messages"),
    [
        (dict(model_type="mistral"), "", ["type mistral", "llama, qwen3 and gpt2 are supported", "ringspan.hf gives it ring"]),
        (dict(hidden_act="gelu"), "", ["hidden_act='gelu'", "'silu' is supported"]),
        ({}, "model=tiny", ["the model's shape is set twice"]),
    ],
)
def test_what_it_cannot_read_is_named(tmp_path: Path, changes: dict[str, Any], option: str, messages: list[str]) -> None:
    folder = folder_of(tmp_path / "model", **changes)
    with pytest.raises(compose.ConfigError) as error:
        load(f"model.from={folder}", *filter(None, [option]))
    assert str(error.value).startswith("model.from=") and all(message in str(error.value) for message in messages)


@pytest.mark.parametrize("folder", ["", "/nowhere"])
def test_no_folder_is_named(folder: str) -> None:
    with pytest.raises(compose.ConfigError, match=r"model\.from="):
        load(f"model.from={folder}")


@pytest.mark.parametrize(("name", "factor"), [("llama-1b", 32.0), ("llama-8b", 8.0)])
def test_presets_scale_positions_as_published(name: str, factor: float) -> None:
    """As in config.json of Llama 3.2 1B and Llama 3.1 8B."""
    published = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    published |= dict(original_max_position_embeddings=8192)
    rope = compose.load([f"model={name}"], world_size=1).config.rope
    assert rope == huggingface_config._read_rope(name, published, dict(rope_theta=500_000.0))
