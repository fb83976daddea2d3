"""Configs of the planner's tests: Llama 8B with 262,144 tokens on four H200."""

from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer

BIG = ["model=llama-8b", "data.length=262144", "data.batch=1", "engine=zero3", "hardware=h200", "hardware.gpus=4"]


def planned(*overrides: str) -> Config:
    """Return BIG with overrides, its model resolved."""
    return tokenizer.resolve_config(compose.load([*BIG, *overrides], world_size=4, planning=True).config)
