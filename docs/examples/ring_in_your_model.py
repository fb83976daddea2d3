"""A plain PyTorch GPT gets ring attention: the lines marked `# ring` are all that changes.

    python docs/examples/ring_in_your_model.py                            starts two gloo ranks of itself
    torchrun --nproc-per-node=4 docs/examples/ring_in_your_model.py       or runs as ranks that you start

The script computes one training step twice: on one rank with torch's SDPA, and with the sequence sharded over all ranks. The
loss and all gradients agree to 1e-12 in fp64. Three rules make them agree: labels are shifted before the sequence is sharded,
positions are global, and the loss is a sum divided by the number of labels of all ranks. (`if ring:` exists only because the
script computes both.)
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist  # ring
from torch import Tensor, nn
from torch.nn import functional as F

from ringspan import Mask, Mesh, context_attention  # ring

VOCABULARY, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, LENGTH = 64, 64, 4, 2, 16, 2, 103


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, S, H, D)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.o = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False), nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, positions: Tensor, attend) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.o(attend(rotate(q, positions), rotate(k, positions), v).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.attend = sdpa

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, self.attend)
        return self.head(self.norm(x))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions."""
    frequencies = 10_000 ** -torch.arange(0, 1, 2 / HEAD_DIM, dtype=torch.float64)
    angles = positions[:, None, None] * frequencies  # (S, 1, D / 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def step(ring: bool) -> list[Tensor]:
    """The loss and all gradients of one step."""
    torch.manual_seed(0)
    model = GPT().double()
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)  # shifted while the sequence is whole
    positions = torch.arange(LENGTH)
    if ring:
        mesh = Mesh(ring=dist.get_world_size())  # ring
        layout = mesh.layout("zigzag", LENGTH)  # ring
        tokens = layout.shard(tokens, 1, mesh.context_rank)  # ring
        labels = layout.shard(labels, 1, mesh.context_rank, fill=-100)  # ring
        positions = layout.positions(mesh.context_rank)  # ring
        model.attend = partial(context_attention, mask=Mask(causal=True), layout=layout, mesh=mesh)  # ring
    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
    num_labels = (labels != -100).sum()
    if ring:
        dist.all_reduce(num_labels)  # ring
    loss = loss / num_labels
    loss.backward()
    results = [loss.detach(), *(weight.grad for weight in model.parameters())]
    if ring:
        for x in results:
            dist.all_reduce(x)  # ring
    return results


def main() -> None:
    dist.init_process_group("gloo")  # ring
    one, many = step(ring=False), step(ring=True)
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, many, strict=True)]
    if dist.get_rank() == 0:
        print(f"loss on one rank {one[0]:.12f}, on {dist.get_world_size()} ranks {many[0]:.12f}")
        print(f"largest relative difference: loss {errors[0]:.1e}, {len(errors) - 1} gradients {max(errors[1:]):.1e}")
        assert max(errors) < 1e-12
    dist.destroy_process_group()  # ring


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [*torchrun, __file__])
    main()
