"""substitute_hf_flash_attn: models with attn_implementation="flash_attention_2" on two ranks, without flash_attn."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.helpers.pool import Failed

pytest.importorskip("transformers")

from ringspan.compat.ring_flash_attn.adapters import hf_adapter
from tests.compat import hf_jobs

LENGTH = sum(hf_jobs.LENGTHS)
WHOLE = [0, 1, 18, 21, LENGTH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_packed_models_equal_dense_attention_on_one_rank(checking_ranks, folder: Path) -> None:
    """Loss, logits and gradients in fp64: plain, with windows, with softcap, with sinks."""
    for errors in checking_ranks(hf_jobs.ring_errors, ["llama", "mistral", "gemma2", "gpt-oss"], str(folder)):
        for name, (error, norm_error) in errors.items():
            assert error < 1e-10 and norm_error < 1e-6, f"{name}: {errors}"


def test_models_run_on_one_rank_with_the_ring_switched_off(checking_ranks, folder: Path) -> None:
    for errors in checking_ranks(hf_jobs.one_rank_errors, "mistral", str(folder)):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(
    ("boundaries", "change", "message"),
    [
        (None, {}, "no batch has been prepared: call update_ring_flash_attn_params"),
        ([0, 40], {}, "q has 18 tokens, local_k_slice is of shards of 20"),
        (WHOLE, dict(attention_mask=torch.tensor([[0] * 2 + [1] * 16])), "attention_mask has padding: leave it out"),
        (
            WHOLE,
            dict(input_ids=torch.ones(2, 18, dtype=torch.int64), position_ids=None),
            "batch=2: packed documents are one row",
        ),
    ],
)
def test_what_the_ring_cannot_honour_is_named(boundaries: Any, change: Any, message: str, checking_ranks, folder: Path) -> None:
    with pytest.raises(Failed) as failed:
        checking_ranks(hf_jobs.wrong_call, str(folder), boundaries, change)
    assert all("ValueError" in error and message in error for error in failed.value.errors), failed.value


def test_positions_of_a_shard_alone_are_refused(checking_ranks, folder: Path) -> None:
    """A model without position_ids counts from 0 on every rank; rank 1 begins inside a document."""
    with pytest.raises(Failed) as failed:
        checking_ranks(hf_jobs.wrong_call, str(folder), [0, LENGTH], dict(position_ids=None))
    message = "position_ids begin with 0, but this shard begins at token 18 of a document"
    assert all(message in error for error in failed.value.errors)


def test_a_changed_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils

    def changed(query: Any, key: Any) -> None: ...

    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_attention_forward", changed)
    with pytest.raises(ValueError, match=r"transformers=.* has another interface .*lacks query_states.* 5.24 is tested"):
        hf_adapter.substitute_hf_flash_attn(None, 1)  # type: ignore[arg-type]


def test_the_names_that_other_packages_import_exist() -> None:
    assert hf_adapter.RING_ATTN_SWITCH is True and isinstance(hf_adapter.DATA_PARAMS, dict)
    functions = hf_adapter.create_ring_flash_attention_forward(None, 1)  # type: ignore[arg-type]
    assert len(functions) == 1 and hf_adapter.check_params(functions[0], functions[0])
    assert not hf_adapter.check_params(functions[0], inspect.signature)
