"""Remedies on a CPU; test_check.py has those on GPUs."""

from dataclasses import replace

from ringspan.trainer.config import compose
from ringspan.trainer.data import tokenizer
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import footprint
from ringspan.trainer.planning.remedies import remedies


def test_remedies_of_a_cpu_mention_no_gpus_and_no_offloading() -> None:
    config = tokenizer.resolve_config(
        compose.load(["model=gpt2-124m", "data.length=65536", "data.batch=2"], world_size=2).config
    )
    small = replace(MACHINES["h200"], gpu=False, memory=footprint(config, 2, False).peak)
    assert all("offload" not in line and "GPU" not in line for line in remedies(config, 2, small))
    assert remedies(config, 2, small)
    assert not remedies(config, 2, replace(small, memory=2**20))
