"""context_parallel: sharding, loss, backward after the `with`, checkpointing, compilation, adapters, and wrong batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.loss import loss_utils

from ringspan import Layout, Mesh
from ringspan.hf import context_parallel
from tests.hf import context_jobs
from tests.hf.models import make_batch, make_model
from tests.parallel.helpers.pool import Failed

Ranks = Callable[..., list[Any]]


def one(ranks: Ranks, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of a job on two ranks."""
    return ranks(job, 2, *args)[:2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_after_the_with(ranks: Ranks, reentrant: bool) -> None:
    """Layers, and the whole model; the ring runs again where nothing else is asked for."""
    for errors in one(ranks, context_jobs.checkpointed, reentrant):
        assert max(errors.values()) < 1e-12, errors


def test_the_ring_is_not_run_again_in_a_recomputation(ranks: Ranks) -> None:
    for plain, saved, error in one(ranks, context_jobs.count_hops):
        assert saved == plain > 0 and error < 1e-12


def test_compiled_layers_equal_eager_ones(ranks: Ranks) -> None:
    for error in one(ranks, context_jobs.compiled):
        assert error < 1e-12


def test_adapters_and_frozen_layers(ranks: Ranks) -> None:
    """LoRA on q and v; everything else is frozen."""
    for errors, frozen in one(ranks, context_jobs.lora):
        assert len(errors) == 8 and max(errors.values()) < 1e-10 and frozen


def test_two_batches_in_flight_and_accumulated(ranks: Ranks) -> None:
    """Two forwards with other documents, then their backwards; one divisor for both."""
    for errors in one(ranks, context_jobs.accumulated):
        assert max(errors.values()) < 1e-10, errors


def test_a_ring_of_a_device_mesh(ranks: Ranks) -> None:
    for errors in ranks(context_jobs.from_device_mesh, 4):
        assert max(errors.values()) < 1e-10, errors


def test_dropout_is_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    two, three = ranks(context_jobs.dropped, 2)[:2], ranks(context_jobs.dropped, 3)[:3]
    assert all(torch.allclose(logits, two[0], rtol=1e-11) for logits in [*two, *three])


WRONG: list[tuple[str, str]] = [
    ("outside", "LlamaAttention 0 of model 'llama' is sharded, outside context_parallel: run the model inside `with ring:`"),
    ("outside again", "LlamaAttention 0 of model 'llama' is sharded, outside context_parallel"),
    ("whole batch", "LlamaAttention 0 of model 'llama' is not sharded, inside context_parallel"),
    ("attention_mask", "attention_mask of LlamaAttention 0 of model 'llama' under a ring: pass it to ring.shard"),
    ("positions", "position_ids of LlamaAttention 0 of model 'llama' are not those of the shard"),
    ("no positions", "position_ids of LlamaAttention 0 of model 'llama' are not those of the shard"),
    ("offsets", "cu_seq_lens_q of LlamaAttention 0 of model 'llama' under a ring: pass it to ring.shard"),
    ("cache", "cache of model 'llama' under a ring: 40 keys for 20 queries"),
    ("labels", "labels under a ring: the model would shift a shard's labels again; use ring.loss"),
    ("mean", "num_items_in_batch=None under a ring: the model would average over a shard"),
    ("classifier", "loss 'ForTokenClassification' of a model under a ring"),
    ("other ring", "was sharded for Mesh.* this is Mesh.*: use one ring for both"),
    ("cross-attention", "cross-attention of BartAttention.* under a ring: not supported; decoder-only models work"),
    ("vision", "batch of ViTAttention.* is not sharded, inside context_parallel"),
    ("ddp", "model=DistributedDataParallel reduces gradients itself"),
    ("logits", r"logits \(2, 20, 61\) and shift_labels \(2, 37\) are not of one shard"),
]


@pytest.mark.parametrize(("name", "message"), WRONG, ids=[name for name, _ in WRONG])
def test_a_wrong_use_of_a_ring_is_named(ranks: Ranks, name: str, message: str) -> None:
    with pytest.raises(Failed, match=message) as failed:
        ranks(context_jobs.wrong_use, 2, name)
    assert all("ValueError" in error for error in failed.value.errors[:2])


def test_different_batches_on_the_ranks_of_a_ring_are_named(ranks: Ranks) -> None:
    with pytest.raises(Failed, match=r"input_ids must be the same on every rank, but rank 0: .*, rank 1: "):
        ranks(context_jobs.different_batches, 2)
    with pytest.raises(Failed, match="rank 1 rejected its arguments: batch has"):
        ranks(context_jobs.rejected_on_one_rank, 2)


RING = context_parallel()


def shard(kind: str = "plain", **changes: Any) -> dict[str, Any]:
    return RING.shard(make_batch(kind) | changes)


IDS, ONES = make_batch("plain")["input_ids"], torch.ones(2, 37, dtype=torch.int64)
PACKED = make_batch("packed")["position_ids"]
BATCHES: list[tuple[str, Callable[[], Any], str]] = [
    ("twice", lambda: RING.shard(shard()), "batch is sharded already"),
    ("nothing", lambda: RING.shard({}), "batch has .*: it needs one of input_ids .* and inputs_embeds"),
    ("shifted twice", lambda: shard(labels=torch.roll(IDS, -1, 1)), "labels are shifted already, and would be shifted twice"),
    ("two labels", lambda: shard(labels=IDS, shift_labels=IDS), "labels and shift_labels disagree"),
    ("packing without positions", lambda: shard(document_ids=ONES), "position_ids are missing with packing"),
    (
        "offsets without positions",
        lambda: RING.shard(dict(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor([0, 9, 37]))),
        "None with cu_",
    ),
    (
        "offsets, two rows",
        lambda: shard("packed", cu_seq_lens_q=torch.tensor([0, 37])),
        "with 2 rows: packing with offsets needs one",
    ),
    (
        "mask and restarts",
        lambda: shard("packed", attention_mask=ONES),
        "attention_mask together with position_ids that restart",
    ),
    ("numbered mask", lambda: shard(attention_mask=ONES * 2), "attention_mask has other values than 0 and 1"),
    ("holes", lambda: shard(attention_mask=1 - (torch.arange(37) == 5).long().expand(2, -1)), "padding between valid tokens"),
    ("matrix", lambda: shard(attention_mask=torch.ones(2, 1, 37, 37)), "a 4-D mask is a matrix, which is not supported"),
    ("3-D positions", lambda: shard(position_ids=torch.zeros(3, 2, 37)), r"position_ids has shape \(3, 2, 37\)"),
    ("image tokens", lambda: shard(token_type_ids=ONES), "token_type_ids mark image tokens"),
    (
        "unknown tensor",
        lambda: shard(pixel_values=torch.zeros(2, 3)),
        r"pixel_values \(2, 3\) is a tensor that ring.shard does not",
    ),
    ("logits_to_keep", lambda: shard(logits_to_keep=1), "logits_to_keep=1: it counts from a shard's end"),
    ("ids", lambda: shard(input_ids=IDS[0]), r"input_ids has shape \(37,\)"),
    ("no batch", lambda: RING.shard(None), "batch must be a mapping with input_ids, not NoneType"),
    ("lists", lambda: shard(input_ids=IDS.tolist()), "input_ids must be a tensor, not list"),
    ("labels", lambda: shard(labels=IDS.tolist()), "labels must be a tensor, not list"),
    ("backend", lambda: context_parallel(backend="cuda"), "backend='cuda': choose one of"),
    ("transport", lambda: context_parallel(transport="pigeon"), "transport='pigeon': choose one of"),
    ("layout", lambda: context_parallel(layout="spiral"), "kind='spiral': choose one of"),
    ("layout's ranks", lambda: context_parallel(layout=Layout("zigzag", 8, 2)), "does not fit Mesh"),
    ("length", lambda: context_parallel(layout=Layout("zigzag", 8, 1)).shard(make_batch("plain")), "layout has length=8"),
    ("mesh", lambda: context_parallel("ring"), "mesh must be a ringspan.Mesh or a DeviceMesh, not str"),
    (
        "gradients",
        lambda: RING.loss(torch.zeros(1, 2, 3), torch.zeros(1, 2), gradients="max"),
        "gradients='max': choose one of",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BATCHES], ids=[case[0] for case in BATCHES])
def test_a_batch_that_cannot_be_sharded_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_shard_has_the_tokens_positions_and_labels_of_its_rank() -> None:
    batch = make_batch("packed")
    ring = context_parallel(Mesh(), layout="zigzag")
    shard = ring.shard(batch | dict(output_router_logits=True))
    assert torch.equal(shard["input_ids"], batch["input_ids"]) and torch.equal(shard["position_ids"], PACKED)
    assert torch.equal(shard["shift_labels"][:, :-1], batch["labels"][:, 1:]) and (shard["shift_labels"][:, -1] == -100).all()
    assert shard["output_router_logits"] is True and shard["use_cache"] is False and "labels" not in shard
    unlabelled = ring.shard(dict(input_ids=IDS))
    assert "shift_labels" not in unlabelled and torch.equal(unlabelled["position_ids"], torch.arange(37)[None])


def test_documents_by_ids_offsets_and_positions_agree() -> None:
    """Also with embeddings instead of ids, and labels that are equal to the ids as a collator makes them."""
    model, ids, positions = make_model("mistral", "ringspan"), IDS[:1], PACKED[:1]
    offsets = torch.tensor([*(positions[0] == 0).nonzero().flatten(), 37], dtype=torch.int32)
    forms: list[dict[str, Any]] = [
        dict(input_ids=ids, position_ids=positions),
        dict(
            input_ids=ids,
            position_ids=positions,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=20,
            max_length_k=20,
        ),
        dict(input_ids=ids, position_ids=positions, seq_idx=(positions == 0).cumsum(-1).int()),
        dict(
            input_ids=ids, position_ids=positions, document_ids=(positions == 0).cumsum(-1), attention_mask=torch.ones_like(ids)
        ),
        dict(inputs_embeds=model.get_input_embeddings()(ids), position_ids=positions, labels=ids),
    ]
    with RING:
        logits = [model(**RING.shard(form)).logits for form in forms]
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_losses_of_transformers_are_put_back() -> None:
    before = dict(loss_utils.LOSS_MAPPING)
    with pytest.raises(KeyError), RING, RING:
        assert before != loss_utils.LOSS_MAPPING
        raise KeyError
    assert before == loss_utils.LOSS_MAPPING
