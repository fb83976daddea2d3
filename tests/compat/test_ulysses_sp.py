"""ringspan.compat.ulysses_sp through accelerate's sp_backend="deepspeed": against DeepSpeed's own classes, and what it adds."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

import deepspeed.runtime.sequence_parallel.ulysses_sp as deepspeed_classes

from ringspan.compat import ulysses_sp
from ringspan.compat.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter, install
from tests.compat import ulysses_jobs
from tests.compat.signatures import signature
from tests.parallel.helpers.pool import Failed, Pool

CLOSE = 1e-5


def test_ten_steps_equal_those_of_deepspeeds_own_classes(checking_ranks: Pool) -> None:
    """Losses and gradients in fp32, DeepSpeed's with sdpa: our ring, our Ulysses, and a contiguous layout."""
    installs = [dict(ulysses=1), dict(ulysses=2), dict(layout="contiguous")]
    for results in checking_ranks(ulysses_jobs.compare_with_deepspeed, 10, installs, patience=300):
        assert max(max(result) for result in results) < CLOSE, results


def test_a_ring_of_ulysses_groups_equals_deepspeeds_own_classes() -> None:
    """Two times two ranks, and two KV heads."""
    pool = Pool(4, timeout=100)
    try:
        for results in pool(ulysses_jobs.compare_with_deepspeed, 4, [dict(ulysses=2)], patience=300):
            assert max(results[0]) < CLOSE, results
    finally:
        pool.close()


def test_steps_that_deepspeeds_classes_refuse_equal_dense_attention(checking_ranks: Pool) -> None:
    """Packed documents and windows, sinks, padding, softcap; a length that no number of ranks divides."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("mistral", dict(packed=True), dict(ulysses=1)),
        ("gpt-oss", {}, dict(ulysses=1)),
        ("mistral", dict(padded=True, length=29), dict(ulysses=2)),
        ("gemma2", dict(packed=True), dict(ulysses=2)),
    ]
    for results in checking_ranks(ulysses_jobs.compare_with_one_rank, cases, patience=300):
        assert max(max(result) for result in results) < CLOSE, results


def test_transformers_trainer_has_the_losses_of_deepspeeds_own_classes(checking_ranks: Pool, tmp_path: Path) -> None:
    expected = checking_ranks(ulysses_jobs.trainer_losses, str(tmp_path))
    assert len(expected[0]) == 6 and expected[0][-1] < expected[0][0]
    for losses in checking_ranks(partial(ulysses_jobs.trainer_losses, ulysses=1), str(tmp_path)):
        assert losses == pytest.approx(expected[0], rel=CLOSE)


def test_evaluation_runs_on_one_rank(checking_ranks: Pool) -> None:
    assert max(checking_ranks(ulysses_jobs.evaluate)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layout", "position_ids of the whole sequence jump to"),
        ("length", "seq_length=40, but the ranks have 32 tokens together"),
        ("mask", "attention_mask of a shard: padding is in position_ids; take the batches of"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(change: str, message: str, checking_ranks: Pool) -> None:
    with pytest.raises(Failed) as failed:
        checking_ranks(ulysses_jobs.forward_wrong, change)
    assert all("ValueError" in error and message in error for error in failed.value.errors), failed.value


def test_signatures_are_deepspeeds() -> None:
    theirs = deepspeed_classes.UlyssesSPAttentionHF.register_with_transformers
    assert signature(UlyssesSPAttentionHF.register_with_transformers) == signature(theirs)
    for name in ("__init__", "__len__", "__iter__", "__next__", "refill"):
        ours, theirs = (getattr(x, name) for x in (UlyssesSPDataLoaderAdapter, deepspeed_classes.UlyssesSPDataLoaderAdapter))
        assert signature(ours) == signature(theirs), name


def adapt(ranks: int = 2, **batch: Any) -> list[dict[str, Any]]:
    """The shards that each rank gets of one batch."""
    adapters = [UlyssesSPDataLoaderAdapter([], rank, None, ranks, "cpu") for rank in range(ranks)]  # type: ignore[arg-type]
    return [adapter._shard(dict(batch)) for adapter in adapters]


def test_a_batch_is_padded_and_cut_as_one() -> None:
    """Five tokens on two ranks: eight, whose chunks 0 and 3, 1 and 2 belong together."""
    ids = torch.tensor([[11, 12, 13, 14, 15]])
    first, second = adapt(input_ids=ids, labels=ids, extra=torch.ones(1, 5, 2), note="kept")
    assert first["input_ids"].tolist() == [[11, 12, 0, 0]] and second["input_ids"].tolist() == [[13, 14, 15, 0]]
    assert first["position_ids"].tolist() == [[0, 1, 1, 2]] and second["position_ids"].tolist() == [[2, 3, 4, 0]]
    assert first["shift_labels"].tolist() == [[12, 13, -100, -100]]
    assert second["shift_labels"].tolist() == [[14, 15, -100, -100]]
    assert first["extra"].shape == (1, 4, 2) and first["note"] == "kept" and "labels" not in first


def test_padding_becomes_a_document_of_its_own() -> None:
    ids = torch.ones(2, 8, dtype=torch.int64)
    mask = torch.tensor([[1] * 5 + [0] * 3, [0, 0] + [1] * 6])
    positions = torch.tensor([list(range(8)), [0, 1, *range(6)]])
    (batch,) = adapt(1, input_ids=ids, position_ids=positions, attention_mask=mask)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert "attention_mask" not in batch


def test_batches_that_the_adapter_cannot_cut_are_named() -> None:
    ids = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"image has shape \(3, 4\), input_ids have \(1, 8\): pass \(B, S, …\)"):
        adapt(input_ids=ids, image=torch.ones(3, 4))
    with pytest.raises(ValueError, match="attention_mask has padding on the left, and position_ids count it"):
        adapt(input_ids=ids, attention_mask=torch.tensor([[0, 0] + [1] * 6]))
    with pytest.raises(ValueError, match="attention_mask has padding between valid tokens"):
        adapt(input_ids=ids, attention_mask=torch.tensor([[1, 0] + [1] * 6]))


def test_arguments_that_do_not_work_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register = UlyssesSPAttentionHF.register_with_transformers
    model = ulysses_jobs.make_model("llama", "eager")
    assert register(model, "eager", 1, 1) is None
    with pytest.raises(ValueError, match=r"core_attn_implementation='eager': its layers call no registered function; 'sdpa'"):
        register(model, "eager", 2, 1)
    with pytest.raises(ValueError, match=r"core_attn_implementation='sdpa', but the model has attn_implementation='eager'"):
        register(model, "sdpa", 2, 1)
    with pytest.raises(ValueError, match=r"seq_length=None with seq_length_is_variable=False"):
        register(model, "eager", 2, 1, seq_length_is_variable=False)
    monkeypatch.setattr(UlyssesSPAttentionHF, "ulysses", 2)
    with pytest.raises(ValueError, match=r"ulysses=2 does not divide sequence_parallel_size=3"):
        register(model, "eager", 3, 1)
    with pytest.raises(ValueError, match=r"kind='diagonal': choose one of"):
        install(layout="diagonal")
    with pytest.raises(ValueError, match=r"kind='striped' with ulysses=2"):
        install(ulysses=2, layout="striped")


def test_a_changed_deepspeed_is_one_line_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def register_with_transformers(self, model: Any) -> None: ...

    monkeypatch.setattr(deepspeed_classes, "UlyssesSPAttentionHF", Changed)
    with pytest.raises(ValueError) as error:
        install()
    message = str(error.value)
    assert message.startswith("deepspeed=") and "register_with_transformers has the parameters" in message
    assert ulysses_sp.TESTED in message and "\n" not in message
