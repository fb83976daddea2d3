"""Trains a small GPT on the bytes of text files, then lets it write: `python -m trainer.train --help`.

This is the single-process core, on one CPU or one GPU. Hydra's configs, DeepSpeed's sharding and the ring grow round it.
"""

import argparse
import os

import torch

from . import data
from .generate import generate
from .loop import train
from .model import GPT, GPTConfig


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m trainer.train", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    ...


if __name__ == "__main__":
    main()
