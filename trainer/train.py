"""Trains a small GPT on the bytes of text files, then lets it go on with a text it has never seen.

This is the core, in one process on one CPU or GPU; Hydra's configs, DeepSpeed's sharding and the ring come round it later.
"""

import argparse
import os

import torch

from .data import VOCABULARY, Dataset, default_text, read_documents, split
from .generate import generate
from .loop import precision, train
from .model import GPT, GPTConfig
from .optim import Cosine

OPTIONS = {
    "steps": (400, "steps of the optimizer"),
    "batch": (8, "sequences in a step"),
    "length": (256, "tokens, which are bytes, in a sequence"),
    "lr": (4e-3, "highest learning rate: reached after a warmup, then left along a cosine"),
    "layers": (GPTConfig.layers, "layers of the model"),
    "dim": (GPTConfig.dim, "width of the model; its MLP is three times as wide"),
    "heads": (GPTConfig.heads, f"query heads, of {GPTConfig.head_dim} numbers each"),
    "kv-heads": (GPTConfig.kv_heads, "key heads; heads must be a multiple of it"),
    "text": (default_text(), "the files to learn from, as a glob pattern in quotes; ** works"),
    "seed": (0, "fixes the weights, the order of the data and the sample"),
    "device": ("auto", "cpu or cuda; auto takes the GPU if there is one"),
}


def choose_device(name: str) -> torch.device:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("this trainer is one process: start it without torchrun, as python -m trainer.train")
    ...
