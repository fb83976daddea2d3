"""FSDP2 around a model of transformers on a ring: bf16 compute, activation checkpointing that does not run the ring again.

    python docs/examples/fsdp2_ring.py                            starts two gloo ranks of itself
    torchrun --nproc-per-node=4 docs/examples/fsdp2_ring.py       or runs as ranks that you start

All ranks form one ring, and FSDP shards the weights over the same ranks. FSDP averages gradients, so the loss is asked for with
gradients="mean". The script prints the number of K/V blocks that a rank receives in a step: on two ranks one for each layer's
forward and one for its backward. Without `save_attention` the recomputation would run the ring again, and receive one more.
"""

import os
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ringspan import Mesh
from ringspan.hf import context_parallel, register, save_attention
from ringspan.parallel.transport.base import received

STEPS, LENGTH = 8, 203


def main() -> None:
    register()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringspan").train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=save_attention))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    ring = context_parallel(Mesh(ring=dist.get_world_size()), layout="zigzag")
    generator = torch.Generator().manual_seed(1)  # the same batches on all ranks of the ring
    phrase = torch.randint(256, (1, 11), generator=generator)
    for step in range(STEPS):
        ids = phrase.repeat(1, LENGTH)[:, step : step + LENGTH]
        blocks = received["kv"]
        with ring:
            batch = ring.shard(dict(input_ids=ids, labels=ids))
            loss = ring.loss(model(**batch).logits, batch["shift_labels"], gradients="mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.5f}, {received['kv'] - blocks} K/V blocks received")


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [*torchrun, __file__])
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
