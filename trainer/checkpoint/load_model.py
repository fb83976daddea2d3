"""A model out of a checkpoint, in one process and without an engine: for generation and for export."""

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from ringspan.trainer.checkpoint.checkpoint import Reader
from ringspan.trainer.config import schema
from ringspan.trainer.data import tokenizer
from ringspan.trainer.model import GPT


class Restored:
    """What a checkpoint says of its model. Weights are mapped, and read when they are used.

    A run's folder stands for its newest checkpoint, which a rename put there whole. Files that were cut short since are
    refused; their hashes are left to the trainer, which checks them when it resumes.
    """

    def __init__(self, path: str) -> None:
        self.folder = find(path)
        self.reader = read(self.folder)
        described = self.reader.state["model"]
        self.model = schema.Model(**described["model"])
        self.rope = schema.Rope(**described["rope"])
        self.length: int = described["length"]
        self.tokenizer_options = schema.TokenizerOptions(**described["tokenizer"])
        # Bytes, the default, made no shards: what did, the run was not told. Older checkpoints do not say `tokens`.
        self.has_tokenizer = not (described.get("tokens", False) and self.tokenizer_options.kind == "bytes")

    def tokenizer(self) -> tokenizer.Tokenizer:
        return tokenizer.load(self.tokenizer_options)

    def weight(self, name: str) -> Tensor:
        return self.reader.weight(name)

    def build(self, device: torch.device, dtype: torch.dtype) -> GPT:
        with torch.device("meta"):
            model = GPT(self.model, self.rope, seed=None)
        model.rope_frequencies()
        weights = {name: self.weight(name).to(device, dtype) for name, _ in model.named_parameters()}
        if self.model.tied:
            weights["head.weight"] = weights["embedding.weight"]
        model.load_state_dict(weights, assign=True)
        if self.model.tied:
            model.head.weight = model.embedding.weight
        return model.eval()


def read(folder: Path) -> Reader:
    """The folder's reader; of a damaged one the error says which checkpoint is the one before."""
    try:
        return Reader(folder)
    except (OSError, ValueError) as error:
        state = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)  # of weights, File names its file itself
        problem = f"checkpoint={str(folder)!r} is damaged: {'state.json: ' * state}{error}"
    for older in reversed([step for step in steps(folder.parent) if _number(step) < _number(folder)]):
        try:
            Reader(older)
        except (OSError, ValueError):
            continue
        raise ValueError(f"{problem}; checkpoint={older} is the one before")
    raise ValueError(f"{problem}; there is none before it")


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder that were written to the end, in their order."""
    found = [step for step in folder.glob("step-*") if _number(step) >= 0 and (step / "manifest.json").is_file()]
    return sorted(found, key=_number)


def _number(step: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", step.name)
    return int(match[1]) if match else -1


def find(path: str) -> Path:
    """A checkpoint's folder, given itself, the folder of all, or the run's."""
    given = Path(path).expanduser()
    if path and (given / "state.json").is_file():
        return given
    for folder in (given / "checkpoints", given) if path else ():
        if whole := steps(folder):
            return whole[-1]
    raise ValueError(f"checkpoint={path!r} is no checkpoint and has none: give a run's folder, or one of its step-… folders")
