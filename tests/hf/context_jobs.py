"""Bodies of tests of context_parallel that run on the ranks of a ring."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForTokenClassification, BartConfig, BartForConditionalGeneration, ViTConfig, ViTModel

from ringspan import Mesh
from ringspan.hf import context_parallel, save_attention
from ringspan.parallel.transport.base import received
from tests.hf import jobs
from tests.hf.models import (
    VOCABULARY,
    gradients_of,
    inputs_of,
    make_batch,
    make_model,
    relative_errors,
    run_oracle,
    valid_rows,
    whole_loss,
)


def checkpointed(ranks: int, reentrant: bool) -> dict[str, float] | None:
    """Gradients with recomputed layers, and with a recomputed model, against the oracle."""
    if not jobs.form_group(ranks):
        return None
    ring, batch = jobs.make_ring(ranks), make_batch("packed")
    expected = run_oracle("mistral", batch)
    model = make_model("mistral", "ringspan").train()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    errors = relative_errors(jobs.run_ring(model, ring, batch), expected)
    model = make_model("mistral", "ringspan")
    with ring:
        shard = ring.shard(batch)
        embeds = model.get_input_embeddings()(shard.pop("input_ids"))
        logits = checkpoint(lambda x: model(inputs_embeds=x, **shard).logits, embeds, use_reentrant=reentrant)
        loss = ring.loss(logits, shard["shift_labels"])
    loss.backward()
    ring.reduce_gradients(model)
    results = dict(logits=ring.gather(logits, shard)[valid_rows(batch)], loss=loss.detach()) | gradients_of(model)
    return errors | {f"model.{name}": error for name, error in relative_errors(results, expected).items()}


def count_hops(ranks: int) -> tuple[int, int, float] | None:
    """Blocks that this rank receives in a step without checkpointing, and in one that keeps attention; largest difference."""
    if not jobs.form_group(ranks):
        return None
    ring, batch, hops, results = jobs.make_ring(ranks), make_batch("plain"), [], []
    for keep in (False, True):
        model = make_model("llama", "ringspan").train()
        if keep:
            model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=save_attention))
        start = received["kv"]
        results.append(jobs.run_ring(model, ring, batch))
        hops.append(received["kv"] - start)
    return hops[0], hops[1], max(relative_errors(*results).values())


def compiled(ranks: int) -> float | None:
    if not jobs.form_group(ranks):
        return None
    ring, batch, results = jobs.make_ring(ranks), make_batch("packed"), []
    for compile in (False, True):
        model = make_model("gpt-oss", "ringspan")
        if compile:
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.self_attn.compile(backend="aot_eager", fullgraph=True)
        results.append(jobs.run_ring(model, ring, batch))
    return max(relative_errors(*results).values())


def lora(ranks: int) -> tuple[dict[str, float], bool] | None:
    """Errors of the adapters' gradients, and whether everything else has none."""
    if not jobs.form_group(ranks):
        return None
    ring, batch, gradients = jobs.make_ring(ranks), make_batch("left"), []
    for attention in ("oracle", "ringspan"):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
        torch.manual_seed(0)
        model = get_peft_model(make_model("qwen3", attention), config).double()
        for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.data.normal_(generator=torch.Generator().manual_seed(index))
        if attention == "ringspan":
            jobs.run_ring(model, ring, batch)
        else:
            whole_loss(model(**inputs_of(batch)).logits, batch["labels"]).backward()
        gradients.append(gradients_of(model))
    return relative_errors(*reversed(gradients)), all("lora_" in name for name in gradients[1])


def accumulated(ranks: int) -> dict[str, float] | None:
    if not jobs.form_group(ranks):
        return None
    ring, batches = jobs.make_ring(ranks), [make_batch("packed", seed=1), make_batch("left", seed=2, length=30)]
    model, whole = make_model("gemma2", "ringspan"), make_model("gemma2", "oracle")
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        logits = whole(**inputs_of(batch)).logits
        labels = batch["labels"]
        (whole_loss(logits, labels) * (labels[:, 1:] != -100).sum() / count).backward()
    with ring:
        shards = [ring.shard(batch) for batch in batches]
        num_items = ring.num_items(*shards)
        losses = [ring.loss(model(**shard).logits, shard["shift_labels"], num_items) for shard in shards]
    assert int(num_items) == count
    for loss in reversed(losses):
        loss.backward()
    ring.reduce_gradients(p for p in model.parameters())
    errors = relative_errors(gradients_of(model), gradients_of(whole))
    return {name: error for name, error in errors.items() if "norm" not in name}


def from_device_mesh(ranks: int) -> dict[str, float] | None:
    """A DeviceMesh of two replicas of two ranks: each replica has other sequences, and gradients are those of both."""
    if not jobs.form_group(ranks):
        return None
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring, batches = context_parallel((device_mesh, "cp"), layout="contiguous"), [make_batch("packed", seed=s) for s in (1, 2)]
    model, whole = make_model("llama", "ringspan"), make_model("llama", "oracle")
    jobs.run_ring(model, ring, batches[ring.mesh.data_rank])
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        (whole_loss(whole(**inputs_of(batch)).logits, batch["labels"]) * count / sum(counts)).backward()
    return relative_errors(gradients_of(model), gradients_of(whole))


def dropped(ranks: int) -> torch.Tensor | None:
    if not jobs.form_group(ranks):
        return None
    ring, model = jobs.make_ring(ranks), make_model("llama", "ringspan", attention_dropout=0.5).train()
    torch.manual_seed(dist.get_rank())  # rank 0 draws the seed for all
    with ring:
        shard = ring.shard(make_batch("plain"))
        return ring.gather(model(**shard).logits, shard)


def different_batches(ranks: int) -> None:
    if jobs.form_group(ranks):
        context_parallel(Mesh(ring=ranks)).shard(make_batch("plain", seed=dist.get_rank()))
    raise ValueError("no part")


def rejected_on_one_rank(ranks: int) -> None:
    if jobs.form_group(ranks):
        context_parallel(Mesh(ring=ranks)).shard(make_batch("plain") if dist.get_rank() == 0 else dict(x=1))
    raise ValueError("no part")


def wrong_use(ranks: int, name: str) -> None:
    """A forward that must raise on every rank that takes part."""
    if not jobs.form_group(ranks):
        raise ValueError("no part")
    ring, batch, model = jobs.make_ring(ranks), make_batch("plain"), make_model("llama", "ringspan")
    shard = ring.shard(batch)
    labels = shard["shift_labels"]
    if name in ("outside", "outside again"):
        if name == "outside again":
            with ring:
                model(**shard)
        model(**shard)
    if name == "other ring":
        with context_parallel(Mesh(ring=ranks)):
            model(**shard)
    if name == "ddp":
        ring.reduce_gradients(torch.nn.parallel.DistributedDataParallel(model))
    if name == "logits":
        ring.loss(torch.zeros(2, 20, VOCABULARY), batch["labels"])
    with ring:
        if name == "whole batch":
            model(batch["input_ids"])
        if name == "attention_mask":
            model(**shard, attention_mask=torch.ones_like(shard["input_ids"]))
        if name == "positions":
            model(**shard | dict(position_ids=shard["position_ids"] + 1))
        if name == "no positions":
            del shard["position_ids"]
            model(**shard)
        if name == "offsets":
            model(**shard, cu_seq_lens_q=torch.tensor([0, 20]))
        if name == "cache":
            model(**shard | dict(cache=model(**shard | dict(use_cache=True)).cache, use_cache=True))
        if name == "labels":
            model(**{key: value for key, value in shard.items() if key != "shift_labels"}, labels=labels)
        if name == "mean":
            model(**shard, labels=labels)
        if name == "classifier":
            classifier = AutoModelForTokenClassification.from_config(model.config, attn_implementation="ringspan").double()
            classifier(**shard, labels=labels)
        if name == "cross-attention":
            shape = dict(d_model=32, vocab_size=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
            config = BartConfig(**shape, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
            bart = BartForConditionalGeneration._from_config(config, attn_implementation="ringspan")
            ids, key = shard["input_ids"], "ringspan_shard"
            bart(ids, decoder_input_ids=ids, **{key: shard[key]})
        if name == "vision":
            small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
            vit = ViTModel._from_config(ViTConfig(**small, image_size=16, patch_size=4), attn_implementation="ringspan")
            vit(torch.randn(1, 3, 16, 16))
