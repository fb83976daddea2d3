"""Ringspan inside models of transformers (5 or newer): attn_implementation="ringspan" on one GPU, or on many by a ring.

    ringspan.hf.register()                                                  adds the attention and its mask function
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="ringspan")
    ring = ringspan.hf.context_parallel(Mesh(ring=8))
    with ring:
        batch = ring.shard(batch)                                           ids, positions, labels shifted before sharding
        loss = ring.loss(model(**batch).logits, batch["shift_labels"])      right for any number of ranks
    loss.backward()
    ring.reduce_gradients(model)

`TrainerMixin` does the same inside transformers' Trainer. Nothing here imports transformers before `register()`.
"""

from ringspan.hf.checkpointing import save_attention
from ringspan.hf.context import RingContext, context_parallel
from ringspan.hf.register import register
from ringspan.hf.trainer import TrainerMixin

__all__ = ["RingContext", "TrainerMixin", "context_parallel", "register", "save_attention"]
