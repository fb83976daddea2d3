"""The mask function: rules of transformers' masks, and everything that is no interval, refused by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from ringspan.hf import masks
from ringspan.hf.masks import LayerMask, check_interface, learn_mask_functions
from tests.hf import models  # noqa: F401  registers ringspan


def make(function: str, attention: str = "ringspan", length: int = 9, **options: Any) -> Any:
    config = SimpleNamespace(
        _attn_implementation=attention, sliding_window=4, attention_chunk_size=3, is_causal=True, model_type="toy"
    )
    known = dict(config=config, inputs_embeds=torch.zeros(2, length, 1), attention_mask=None, cache=None)
    return getattr(masking_utils, function)(**known | options)


def visible(mask: LayerMask) -> torch.Tensor:
    assert mask.mask is not None
    rows = torch.arange(mask.q_length)
    return mask.mask.visible(rows, rows).expand(2, -1, -1)


@pytest.mark.parametrize("function", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_random_masks_equal_those_of_transformers(function: str) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.rand(2, 9, generator=generator) < 0.3
        positions = torch.stack([_positions(row) for row in starts])
        left, right = torch.randint(0, 4, (2, 2), generator=generator)
        index = torch.arange(9)
        padding = ((index >= left[:, None]) & (index < 9 - right[:, None])).long()
        for options in (dict(position_ids=positions), dict(attention_mask=padding)):
            expected = make(function, "oracle", **options)[:, 0]
            same = visible(make(function, **options)) == expected
            rows = padding.bool() if "attention_mask" in options else torch.ones(2, 9, dtype=torch.bool)
            assert same[rows].all()


def _positions(starts: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(starts))
    return positions - torch.where(starts, positions, 0).cummax(0).values


def test_no_matrix_is_built() -> None:
    """A matrix of these lengths would have 2^42 entries."""
    mask = make("create_causal_mask", length=2**21, attention_mask=torch.ones(2, 2**21, dtype=torch.int64))
    assert mask.mask.documents is None and mask.q_length == 2**21


def overlay(*index: torch.Tensor) -> torch.Tensor:
    return index[2] % 2 == 0


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("or_mask_function", lambda: make("create_causal_mask", or_mask_function=overlay), "or_mask_function of model 'toy'"),
    (
        "and_mask_function",
        lambda: make("create_causal_mask", and_mask_function=overlay),
        "and_mask_function=overlay of model 'toy'",
    ),
    ("chunked", lambda: make("create_chunked_causal_mask"), r"chunked attention \(attention_chunk_size\) of model 'toy'"),
    (
        "image tokens",
        lambda: make("create_causal_mask", block_sequence_ids=torch.zeros(2, 9, dtype=torch.int64)),
        r"block_sequence_ids \(an image-token mask\) of model 'toy'",
    ),
    (
        "holes",
        lambda: make("create_causal_mask", attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]] * 2)),
        "'toy': attention_mask has padding between valid tokens",
    ),
    (
        "static cache",
        lambda: masks.layer_mask(2, 1, 16, torch.tensor(3), 0, masking_utils.causal_mask_function, config=None),
        "cache of model 'NoneType': a static or unfilled cache",
    ),
    (
        "short mask",
        lambda: masks.layer_mask(2, 1, 9, 8, 0, masking_utils.causal_mask_function, torch.ones(2, 4, dtype=torch.bool)),
        "attention_mask of model 'NoneType' has 4 entries for 9 keys",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_mask_that_is_no_interval_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert any(hint in str(error.value) for hint in ("'eager' or 'sdpa'", "works", "pass", "pad"))


@pytest.mark.parametrize("change", ["missing", "closure", "meaning"])
def test_a_changed_interface_is_detected(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = SimpleNamespace(**vars(masking_utils))
    if change == "missing":
        del changed.sliding_window_overlay
    elif change == "closure":
        changed.sliding_window_overlay = lambda size: lambda *index: index[3] > index[2] - size
    if change != "meaning":
        with pytest.raises(ValueError, match=r"masking_utils\.sliding_window_overlay"):
            learn_mask_functions(changed)
        return
    original = masking_utils.sliding_window_overlay
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda size: original(size + 1))
    check = masks.MaskRules.joined  # our reading changes too, so the meaning is changed on one side only
    monkeypatch.setattr(masks.MaskRules, "joined", lambda a, b: check(a, b)._replace(left=min(a.left, b.left, 2)))
    with pytest.raises(ValueError, match=r"create_sliding_window_causal_mask with window=3.*differs"):
        check_interface(masking_utils, "ringspan")
