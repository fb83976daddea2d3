"""FLOPs and parameters: against the mask's visible pairs, and against the published sizes of the presets."""

import pytest
import torch

from ringspan import Mask
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Model
from ringspan.trainer.planning import flops

MODEL = Model(vocabulary=100, layers=3, dim=32, heads=4, kv_heads=2, head_dim=16, mlp_dim=48, windows=[3, 0])


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("lengths", [[1], [7], [5, 1, 30], [64]])
def test_visible_pairs_are_those_of_the_mask(lengths: list[int], window: int) -> None:
    mask = Mask.from_lengths(lengths, causal=True, window=window or None)
    positions = torch.arange(sum(lengths))
    assert flops.visible_pairs(lengths, window) == int(mask.visible(positions, positions).sum())


def test_step_counts_matmuls_and_the_visible_pairs_of_each_layer() -> None:
    lengths = [10, 6]
    weights = 3 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48) + 100 * 32
    pairs = 2 * flops.visible_pairs(lengths, 3) + flops.visible_pairs(lengths)  # layers 0 and 2 have the window
    for convention, factor in (("3x", 3), ("3.5x", 3.5)):
        assert flops.training_flops(MODEL, lengths, convention) == 6 * weights * 16 + factor * 4 * 64 * pairs
    assert flops.training_flops(MODEL, lengths) == flops.training_flops(MODEL, lengths, "3.5x")


def test_long_sequences_do_not_overflow() -> None:
    assert flops.visible_pairs([2**22]) == 2**22 * (2**22 + 1) // 2
    assert flops.visible_pairs([2**22], 4096) == 4096 * 4097 // 2 + (2**22 - 4096) * 4096


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        *[("gpt2-124m", 124_439_808), ("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248)],
        *[("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)],
    ],
)
def test_presets_have_their_published_sizes(preset: str, published: int) -> None:
    model = compose.load([f"model={preset}", "data=stdlib"], world_size=1).config.model
    model.max_positions = model.max_positions or 1024
    assert flops.parameters(model).total == published
