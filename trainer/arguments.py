"""Every option of a run, with its default and its help. Imports no torch: whoever plans a run need not wait for it."""

import argparse
import glob
import sysconfig
from dataclasses import dataclass, field, fields
from typing import Any


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """The defaults train on a laptop's CPU in about a minute."""

    steps: int = option(400, "steps of the optimizer")
    batch: int = option(8, "sequences in a step")
    length: int = option(256, "tokens, which are bytes, in a sequence")
    lr: float = option(4e-3, "highest learning rate: reached after a warmup, then left along a cosine")
    layers: int = option(4, "layers of the model")
    dim: int = option(128, "width of the model; its MLP is three times as wide")
    heads: int = option(2, "query heads, of 64 numbers each")
    kv_heads: int = option(1, "key heads; heads must be a multiple of it")
    # Python's own library is text that every machine has on which this runs.
    text: str = option(
        glob.escape(sysconfig.get_path("stdlib")) + "/*.py",
        "the files to learn from, as a glob pattern in quotes; ** works",
    )
    seed: int = option(0, "fixes the weights and the order of the data")
    device: str = option("auto", "cpu or cuda; auto takes the GPU if there is one")


def parse(program: str, about: str | None, argv: list[str] | None = None) -> Config:
    """The config that a command line asks for; what it cannot mean ends the program with a message."""
    parser = argparse.ArgumentParser(
        program, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    for given in fields(Config):
        text = given.metadata["help"]
        parser.add_argument("--" + given.name.replace("_", "-"), type=given.type, default=given.default, help=text)
    return Config(**vars(parser.parse_args(argv)))
