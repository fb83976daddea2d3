"""Who owns which tokens.

    layout = Layout("zigzag", length=S, ranks=P)
    mine   = layout.shard(x, dim=1, rank=r)             every shard has layout.local_length tokens
    x      = layout.unshard([shard, …], dim=1)          the original, without padding

- contiguous: rank r owns one piece. Under a causal mask the last rank has nearly all the work.
- zigzag: 2P chunks, rank r owns r and 2P-1-r. Causal work is even to the last pair, and a shard is two runs of positions.
- striped: rank r owns r, r + P, r + 2P, … Even for nearly any mask, windows included, but every rank needs every block.

Any length and any number of ranks: the layout pads the sequence to whole shards. Padding has positions >= length and is
the tail of a shard in all three kinds, so `segments` describe the real tokens, which come first, and nothing else.

With `ulysses` = U the ranks are U times the ring's, rank = ring rank · U + ulysses rank, and the U shards of a ring rank,
one after another, are that ring rank's shard: what a Ulysses group gathers is no more segments than the ring alone has.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import Segment, cut, num_rows, positions

KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Layout:
    kind: str
    length: int
    ranks: int
    ulysses: int = 1
    multiple: int = 1  # a ring rank's shard is padded to a multiple of this
    ring: "Layout" = field(init=False, repr=False, compare=False)  # how the ring sees it: a shard for each Ulysses group
    local_length: int = field(init=False, repr=False, compare=False)  # tokens of a shard, padding included

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: choose one of {KINDS}")
        for name, least in (("length", 0), ("ranks", 1), ("ulysses", 1), ("multiple", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r} must be an int >= {least}")
        if self.ranks % self.ulysses:
            raise ValueError(f"ranks={self.ranks} are not a multiple of ulysses={self.ulysses}: their ratio is the ring's size")
        if self.kind == "striped" and self.ulysses > 1:
            raise ValueError(f"kind='striped' with ulysses={self.ulysses}: use 'zigzag', which is as even under a causal mask")
        # Now and not when first asked for: torch.compile cannot look into a cached property before Python 3.12.
        ring, multiple = self, math.lcm(self.multiple, self.ulysses)
        if self.ulysses > 1:
            ring = Layout(self.kind, self.length, self.ranks // self.ulysses, multiple=multiple)
        object.__setattr__(self, "ring", ring)
        object.__setattr__(self, "local_length", self._local_length())

    def _local_length(self) -> int:
        if self.ulysses > 1:
            return self.ring.local_length // self.ulysses
        if self.kind == "zigzag" and self.ranks > 1:
            chunk_multiple = self.multiple // math.gcd(self.multiple, 2)
            return 2 * _round_up(-(-self.length // (2 * self.ranks)), chunk_multiple)
        return _round_up(-(-self.length // self.ranks), self.multiple)

    def segments(self, rank: int) -> list[Segment]:
        """Where the real tokens of a shard stand: (start, step, count), in the order of its rows."""
        real = []
        for start, step, count in self._padded(rank):
            count = min(count, max(0, -((start - self.length) // step)))
            if count:
                real.append((start, step, count))
        return real

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """(local_length,) int64: the global position of each row; that of padding is >= length."""
        return positions(self._padded(rank), device)

    def shard(self, x: Tensor, dim: int, rank: int, fill: float = 0) -> Tensor:
        """This rank's rows of a whole tensor; padding holds `fill` (labels want -100, document ids -1)."""
        dim = self._check_dim(x, dim, self.length, "x")
        pieces = []
        for start, step, count in self.segments(rank):
            rows = slice(start, start + (count - 1) * step + 1, step)
            pieces.append(x[(slice(None),) * dim + (rows,)])
        missing = self.local_length - num_rows(self.segments(rank))
        if missing or not pieces:
            shape = list(x.shape)
            shape[dim] = missing
            pieces.append(x.new_full(shape, fill))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def unshard(self, shards: list[Tensor], dim: int) -> Tensor:
        """The whole tensor from all ranks' shards, in rank order."""
        if len(shards) != self.ranks:
            raise ValueError(f"{len(shards)} shards are given, the layout has ranks={self.ranks}: give one of each rank")
        real, at = [], []
        for rank, shard in enumerate(shards):
            dim = self._check_dim(shard, dim, self.local_length, f"shard {rank}")
            segments = self.segments(rank)
            real.append(shard.narrow(dim, 0, num_rows(segments)))
            at.append(positions(segments))
        return torch.cat(real, dim).index_select(dim, torch.cat(at).argsort().to(shards[0].device))

    def work(self, mask: Mask | None) -> list[int]:
        """Visible pairs of each rank, over all rows of a batch that documents or prefixes are given for.

        The ranks of a Ulysses group share their pairs, for each has all of the group's tokens and some of the heads.
        """
        mask = Mask() if mask is None else mask
        if not isinstance(mask, Mask):
            raise ValueError(f"mask must be a kernels.Mask or None, not {type(mask).__name__}")
        self.check_mask(mask)
        pairs = []
        for rank in range(self.ring.ranks):
            lo, hi = mask.interval(positions(self.ring.segments(rank)).to(_device(mask)), self.length)
            total = int((hi - lo + 1).clamp(min=0).sum())
            pairs += [(total + part) // self.ulysses for part in reversed(range(self.ulysses))]
        return pairs

    def check_mask(self, mask: Mask) -> None:
        if mask.length is not None and mask.length != self.length:
            raise ValueError(
                f"mask.documents describe {mask.length} positions, the layout {self.length}: give the ids of the whole "
                "sequence, in natural order, on every rank"
            )

    def _padded(self, rank: int) -> list[Segment]:
        """All rows of a shard, padding included."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank={rank}: this layout has ranks 0 to {self.ranks - 1}")
        n, ranks = self.local_length, self.ranks
        if self.ulysses > 1:
            ring_rank, part = divmod(rank, self.ulysses)
            return cut(self.ring._padded(ring_rank), part * n, (part + 1) * n)
        if self.kind == "striped":
            return [(rank, ranks, n)]
        if self.kind == "zigzag" and ranks > 1:
            return [(rank * n // 2, 1, n // 2), ((2 * ranks - 1 - rank) * n // 2, 1, n // 2)]
        return [(rank * n, 1, n)]

    @staticmethod
    def _check_dim(x: Tensor, dim: int, size: int, name: str) -> int:
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim}: {name} has {x.ndim} dimensions")
        dim %= x.ndim
        if x.shape[dim] != size:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: dim {dim} must be {size} long, as the layout says")
        return dim


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _device(mask: Mask) -> torch.device:
    """Where the mask's tensors are: asking it about positions elsewhere would move them."""
    return next((t.device for t in mask.bounds()[3:] if t is not None), torch.device("cpu"))
