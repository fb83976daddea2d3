"""Attention in a model block: GQA, a window, sinks, packed documents of different lengths; compared with torch's SDPA.

    python docs/examples/attention.py

Each line of the output compares one forward and backward of the block with the same block over SDPA, which needs the mask as
a (length × length) matrix. A `Mask` is an interval of keys per query instead, and tiles that it hides are never computed.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringspan import Mask, attention

DIM, HEADS, KV_HEADS, HEAD_DIM = 96, 6, 2, 16
LENGTHS = [100, 37, 63]  # three documents in one packed sequence
LENGTH = sum(LENGTHS)


class Attention(nn.Module):
    """Grouped-query attention with learned sinks; `attend` is ringspan.attention or a function with its signature."""

    def __init__(self, attend=attention) -> None:
        super().__init__()
        self.attend = attend
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))  # (B, S, H, D)
        return self.o(self.attend(q, k, v, mask=mask, sinks=self.sinks).flatten(-2))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
    """The same over torch's SDPA: a sink is one more key, whose score is the sink and whose value is 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, S, D)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    positions = torch.arange(LENGTH)
    hidden = ~mask.visible(positions, positions)  # (1, S, S)
    scores = torch.zeros(1, LENGTH, LENGTH, dtype=q.dtype).masked_fill(hidden, float("-inf"))
    bias = torch.cat([scores[:, None].expand(-1, HEADS, -1, -1), sinks[None, :, None, None].expand(1, -1, LENGTH, 1)], dim=-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True).transpose(1, 2)


def run(block: Attention, x: Tensor, mask: Mask, dout: Tensor) -> list[Tensor]:
    """Output, and gradients of every parameter (sinks included)."""
    out = block(x, mask)
    return [out.detach(), *torch.autograd.grad(out, list(block.parameters()), dout)]


def main() -> None:
    torch.manual_seed(0)
    block = Attention().double()
    with torch.no_grad():
        block.sinks.normal_()
    plain = Attention(sdpa).double()
    plain.load_state_dict(block.state_dict())
    x, dout = torch.randn(2, 1, LENGTH, DIM, dtype=torch.float64)
    masks = {
        "causal": Mask(causal=True),
        "causal, window of 32": Mask(causal=True, window=32),
        "causal, three documents": Mask.from_lengths(LENGTHS, causal=True),
        "causal, documents, window": Mask.from_lengths(LENGTHS, causal=True, window=32),
        "causal with a prefix of 24": Mask(causal=True, prefix=24),
        "all keys": Mask(),
    }
    for name, mask in masks.items():
        pairs = zip(run(block, x, mask, dout), run(plain, x, mask, dout), strict=True)
        error = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
        print(f"{name:26}  largest relative difference from SDPA, output and gradients: {error:.1e}")


if __name__ == "__main__":
    main()
