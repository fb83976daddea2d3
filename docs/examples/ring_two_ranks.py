"""Ring attention over two ranks on the CPU: shard, ring_attention, unshard; equal to attention on one rank.

    python docs/examples/ring_two_ranks.py                            starts two gloo ranks of itself
    torchrun --nproc-per-node=4 docs/examples/ring_two_ranks.py       or runs as ranks that you start

On GPUs, call torch.cuda.set_device first, use the nccl backend, and keep the tensors in bf16 or fp16.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan import Layout, Mask, attention, ring_attention

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1_003, 4, 2, 32  # any length works: the layout pads


def gather(shard: Tensor) -> list[Tensor]:
    """Every rank's shard, in rank order."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard.contiguous())
    return shards


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # the same sequence on every rank, only to compare results
    sizes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (HEADS, HEAD_DIM)]
    q, k, v, dout = (torch.randn(1, LENGTH, *size, dtype=torch.float64, generator=generator) for size in sizes)
    mask = Mask.from_lengths([400, 350, 253], causal=True)  # documents of the whole sequence, on every rank

    layout = Layout("zigzag", length=LENGTH, ranks=ranks)
    local = [layout.shard(x, dim=1, rank=rank).requires_grad_() for x in (q, k, v)]
    out = ring_attention(*local, mask=mask, layout=layout)
    gradients = torch.autograd.grad(out, local, layout.shard(dout, dim=1, rank=rank))
    results = [layout.unshard(gather(x.detach()), dim=1) for x in (out, *gradients)]

    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = attention(*inputs, mask=mask)
    expected_gradients = torch.autograd.grad(expected, inputs, dout)
    if rank == 0:
        print(f"{layout.kind}, {LENGTH:,} tokens on {ranks} ranks: {layout.local_length} on each, padding included")
        for name, ring, one in zip(("out", "dq", "dk", "dv"), results, (expected, *expected_gradients), strict=True):
            print(f"{name:3}  largest difference from one rank: {float((ring - one.detach()).abs().max()):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [*torchrun, __file__])
    main()
