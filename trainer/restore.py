"""A model out of a checkpoint, in one process and without an engine: for generation and for export."""

import re
from pathlib import Path

import torch
from torch import Tensor

from . import config, tokenizer
from .checkpoint import Reader
from .model import GPT


class Restored:
    """What a checkpoint says of its model. Weights are mapped, and read when they are used.

    A run's folder stands for its newest checkpoint, which a rename put there whole. Files that were cut short since are
    refused; their hashes are left to the trainer, which checks them when it resumes.
    """

    def __init__(self, path: str) -> None:
        self.folder = find(path)
        self.reader = Reader(self.folder)
        described = self.reader.state["model"]
        self.model = config.Model(**described["model"])
        self.rope = config.Rope(**described["rope"])
        self.length: int = described["length"]
        self.tokenizer_options = config.Tokenizer(**described["tokenizer"])

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


def find(path: str) -> Path:
    """A checkpoint's folder, given itself, the folder of all, or the run's."""
    given = Path(path).expanduser()
    if path and (given / "state.json").is_file():
        return given
    for folder in (given / "checkpoints", given) if path else ():
        steps = sorted(
            (int(match[1]), step) for step in folder.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", step.name))
        )
        whole = [step for _, step in steps if (step / "manifest.json").is_file()]
        if whole:
            return whole[-1]
    raise ValueError(f"checkpoint={path!r} is no checkpoint and has none: give a run's folder, or one of its step-… folders")
