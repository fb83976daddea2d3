"""Loads a model from a checkpoint, in one process and without an engine: for generation and export."""

import re
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ringspan.trainer.checkpoint.reader import Reader
from ringspan.trainer.config import foreign, schema, validate
from ringspan.trainer.data import tokenizer
from ringspan.trainer.model import GPT


class RestoredModel:
    """The model of a checkpoint: shape, tokenizer and memory-mapped weights.

    Truncated files are rejected. Hashes are not checked here; the trainer checks them when it resumes.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run's folder, which stands for its newest complete checkpoint.
    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """

    def __init__(self, path: str) -> None:
        self.folder = find_checkpoint(path)
        self.reader = open_reader(self.folder)
        saved = self.reader.state.get("model")
        where = f"checkpoint={str(self.folder)!r}: state.json"
        if not isinstance(saved, dict):
            raise ValueError(f"{where} describes no model")
        self.model: schema.Model = foreign.to_schema(schema.Model, saved.get("model"), f"{where}: model")
        self.rope: schema.Rope = foreign.to_schema(schema.Rope, saved.get("rope"), f"{where}: rope")
        options = foreign.to_schema(schema.TokenizerOptions, saved.get("tokenizer"), f"{where}: tokenizer")
        self.tokenizer_options: schema.TokenizerOptions = options
        problems = [text for node in (self.model, self.rope, options) for text in validate.validate_values(node)]
        self.length: int = length if type(length := saved.get("length")) is int else 0
        if self.length < 1:
            problems.append(f"length={length}: it must be a number of tokens")
        layers = len({name.split(".")[1] for name in self.reader.names if name.startswith("layers.")})
        if layers != self.model.layers:  # building the layers of a damaged number may take all memory
            problems.append(f"model.layers={self.model.layers}: the files have {layers}")
        if problems := problems or [*validate.validate_shape(self.model), *validate.validate_rope(self.rope)]:
            raise ValueError(f"{where}: {'; '.join(problems)}")
        # With token shards and the default kind, bytes, the tokenizer is unknown. Older checkpoints have no `tokens`.
        self.has_tokenizer = not (saved.get("tokens", False) and self.tokenizer_options.kind == "bytes")

    def tokenizer(self) -> tokenizer.Tokenizer:
        """Load the tokenizer of the run."""
        return tokenizer.load(self.tokenizer_options)

    def weight(self, name: str) -> Tensor:
        """Return a weight in fp32, mapped from the file."""
        return self.reader.weight(name)

    def build(self, device: torch.device, dtype: torch.dtype) -> GPT:
        """Build the model in eval mode, with its weights on a device and in a dtype."""
        try:
            with torch.device("meta"):
                model = GPT(self.model, self.rope, seed=None)
        except (RuntimeError, OverflowError, TypeError) as error:  # torch's errors for sizes of a damaged state.json
            raise ValueError(f"checkpoint={str(self.folder)!r}: state.json describes no model: {error}") from None
        self.reader.validate({name: tuple(weight.shape) for name, weight in model.named_parameters()}, optimizer="")
        model.set_rope_frequencies()
        weights = {name: self.weight(name).to(device, dtype) for name, _ in model.named_parameters()}
        if self.model.tied:
            weights["head.weight"] = weights["embedding.weight"]
        model.load_state_dict(weights, assign=True)
        if self.model.tied:
            model.head.weight = cast(nn.Parameter, model.embedding.weight)  # load_state_dict(assign=True) breaks the tie
        return model.eval()


def open_reader(folder: Path) -> Reader:
    """Open a checkpoint; the error of a damaged one names the newest older checkpoint that can be read."""
    try:
        return Reader(folder)
    except (OSError, ValueError) as error:
        problem = f"checkpoint={str(folder)!r} is damaged: {error}"
    for older in reversed([step for step in complete_checkpoints(folder.parent) if _number(step) < _number(folder)]):
        try:
            Reader(older)
        except (OSError, ValueError):
            continue
        raise ValueError(f"{problem}; checkpoint={older} is the one before")
    raise ValueError(f"{problem}; there is none before it")


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, in the order of their steps."""
    return sorted(
        (step for step in folder.glob("step-*") if _number(step) >= 0 and (step / "manifest.json").is_file()), key=_number
    )


def _number(step: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", step.name)
    return int(match[1]) if match else -1


def find_checkpoint(path: str) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one in its folder or in a run's folder."""
    root = Path(path).expanduser()
    if path and (root / "state.json").is_file():
        return root
    for folder in (root / "checkpoints", root) if path else ():
        if checkpoints := complete_checkpoints(folder):
            return checkpoints[-1]
    raise ValueError(
        f"checkpoint={path!r} is no checkpoint and contains none: give a run's folder, or one of its step-… folders"
    )


def own_checkpoint(path: str) -> Path | None:
    """Return the checkpoint of ours that a path names, as in `find_checkpoint`; None for a folder in Hugging Face's format."""
    if (Path(path).expanduser() / "config.json").exists():
        return None
    try:
        return find_checkpoint(path)
    except ValueError:
        return None
