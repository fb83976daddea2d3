"""Layout: which rank owns which tokens of a sequence.

    kind         rank r of P owns                   work per rank
    contiguous   the r-th of P blocks               causal: the last rank has nearly all of it
    zigzag       chunks r and 2P−1−r of 2P chunks   causal: even to the last pair; a shard is two segments
    striped      tokens r, r + P, r + 2P, …         even for nearly any mask, windows too; every rank needs every block

A layout accepts any length and any number of ranks: it pads the sequence to whole shards. Padding rows have positions
>= length and are the tail of a shard in all three kinds, so `segments` lists the real tokens, which come first.

With `ulysses` = U there are U ranks per ring rank, rank = ring_rank · U + ulysses_rank. The U shards of a Ulysses group,
one after another, form its ring rank's shard. The gathered rows therefore have no more segments than a ring shard has.
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
    """Assignment of the tokens of one sequence to ranks. Immutable and hashable.

    Args:
        kind: "contiguous" (rank r owns the r-th of P blocks), "zigzag" (chunks r and 2P−1−r of 2P chunks; even work under a
            causal mask) or "striped" (tokens r, r + P, …; even work for nearly any mask, but every rank needs every block).
        length: Number of tokens in the whole sequence; 0 is allowed.
        ranks: Number of ranks that share the sequence, Ulysses ranks included.
        ulysses: Number of ranks in a Ulysses group; must divide `ranks`. "striped" requires 1.
        multiple: Pad each ring rank's shard to a multiple of this many tokens.

    Attributes:
        local_length: Number of tokens in a shard, padding included; the same on every rank.
        ring: The layout of the ring, with one rank per Ulysses group. It is the layout itself if `ulysses` is 1.

    Raises:
        ValueError: An argument has an unsupported value. The message names it.
    """

    kind: str
    length: int
    ranks: int
    ulysses: int = 1
    multiple: int = 1
    _ring: "Layout | None" = field(init=False, repr=False, compare=False)  # None: the layout itself
    local_length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: choose one of {KINDS}")
        for name, minimum in (("length", 0), ("ranks", 1), ("ulysses", 1), ("multiple", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise ValueError(f"{name}={value!r} must be an int >= {minimum}")
        if self.ranks % self.ulysses:
            raise ValueError(
                f"ranks={self.ranks} is not a multiple of ulysses={self.ulysses}: the ring has ranks / ulysses ranks"
            )
        if self.kind == "striped" and self.ulysses > 1:
            raise ValueError(
                f"kind='striped' with ulysses={self.ulysses}: not supported; 'zigzag' balances causal work as evenly"
            )
        # Plain attributes instead of cached properties, which torch.compile cannot trace before Python 3.12.
        ring, multiple = None, math.lcm(self.multiple, self.ulysses)
        if self.ulysses > 1:
            ring = Layout(self.kind, self.length, self.ranks // self.ulysses, multiple=multiple)
        object.__setattr__(self, "_ring", ring)
        object.__setattr__(self, "local_length", self._local_length())

    @property
    def ring(self) -> "Layout":
        return self if self._ring is None else self._ring

    def _local_length(self) -> int:
        if self.ulysses > 1:
            return self.ring.local_length // self.ulysses
        if self.kind == "zigzag" and self.ranks > 1:
            chunk_multiple = self.multiple // math.gcd(self.multiple, 2)
            return 2 * _round_up(-(-self.length // (2 * self.ranks)), chunk_multiple)
        return _round_up(-(-self.length // self.ranks), self.multiple)

    def segments(self, rank: int) -> list[Segment]:
        """Return the segments (start, step, count) of a shard's real tokens, in row order.

        Args:
            rank: Rank of the shard, 0 … ranks − 1.

        Returns:
            At most two segments; none if the shard holds only padding.
        """
        segments = []
        for start, step, count in self._padded(rank):
            count = min(count, max(0, -((start - self.length) // step)))
            if count:
                segments.append((start, step, count))
        return segments

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the global position of each row of a shard.

        Args:
            rank: Rank of the shard, 0 … ranks − 1.
            device: Device of the result.

        Returns:
            (local_length,) int64, ascending. Padding rows have positions >= length.
        """
        return positions(self._padded(rank), device)

    def shard(self, x: Tensor, dim: int, rank: int, fill: float = 0) -> Tensor:
        """Return one rank's shard of a tensor that spans the whole sequence. Differentiable.

        Args:
            x: Tensor with `length` entries in dimension `dim`.
            dim: Sequence dimension of `x`; negative values count from the end.
            rank: Rank of the shard, 0 … ranks − 1.
            fill: Value of padding rows. Use −100 for labels and −1 for document ids.

        Returns:
            Tensor of the shape of `x`, with `local_length` entries in dimension `dim`.

        Raises:
            ValueError: `dim`, `rank` or the size of `x` does not fit the layout, or the dtype of `x` has no value `fill`.
        """
        dim = self._check_dim(x, dim, self.length, "x")
        _check_fill(fill, x.dtype)
        pieces = []
        for start, step, count in self.segments(rank):
            rows = slice(start, start + (count - 1) * step + 1, step)
            pieces.append(x[(slice(None),) * dim + (rows,)])
        num_padding = self.local_length - num_rows(self.segments(rank))
        if num_padding or not pieces:
            shape = list(x.shape)
            shape[dim] = num_padding
            pieces.append(x.new_full(shape, fill))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def unshard(self, shards: list[Tensor], dim: int) -> Tensor:
        """Reassemble the whole tensor from the shards of all ranks, without padding. Differentiable.

        Args:
            shards: One shard per rank, in rank order, each with `local_length` entries in dimension `dim`.
            dim: Sequence dimension; negative values count from the end.

        Returns:
            Tensor with `length` entries in dimension `dim`, in natural order, on the device of the first shard.

        Raises:
            ValueError: The number of shards is not `ranks`, or a shard has another size.
        """
        if len(shards) != self.ranks:
            raise ValueError(f"shards has {len(shards)} tensors, the layout has ranks={self.ranks}: pass one shard per rank")
        real_rows, row_positions = [], []
        for rank, shard in enumerate(shards):
            dim = self._check_dim(shard, dim, self.local_length, f"shard {rank}")
            segments = self.segments(rank)
            real_rows.append(shard.narrow(dim, 0, num_rows(segments)))
            row_positions.append(positions(segments))
        return torch.cat(real_rows, dim).index_select(dim, torch.cat(row_positions).argsort().to(shards[0].device))

    def work(self, mask: Mask | None) -> list[int]:
        """Return each rank's number of visible (query, key) pairs, which shows the load balance.

        Args:
            mask: Attention mask of the whole sequence; None means that every query attends to every key.

        Returns:
            One number per rank. If `mask` has a batch of documents or prefixes, the numbers are sums over the batch.
            The ranks of a Ulysses group split their group's pairs evenly: each has all rows of the group and some heads.

        Raises:
            ValueError: `mask` is not a Mask, or its documents have another length than the layout.
        """
        mask = Mask() if mask is None else mask
        if not isinstance(mask, Mask):
            raise ValueError(f"mask must be a ringspan.Mask or None, not {type(mask).__name__}")
        self.check_mask(mask)
        pairs = []
        for rank in range(self.ring.ranks):
            lo, hi = mask.interval(positions(self.ring.segments(rank)).to(_device(mask)), self.length)
            total = int((hi - lo + 1).clamp(min=0).sum())
            pairs += [(total + i) // self.ulysses for i in reversed(range(self.ulysses))]
        return pairs

    def check_shards(self, **shards: Tensor) -> None:
        """Raise a ValueError if a tensor (B, n, …) has another number of rows than a shard of this layout."""
        for name, x in shards.items():
            if x.shape[1] != self.local_length:
                raise ValueError(
                    f"{name} has {x.shape[1]} tokens, but a shard of {self} has {self.local_length}: "
                    "cut the sequence with layout.shard, or make a layout of its length"
                )

    def check_mask(self, mask: Mask) -> None:
        """Raise a ValueError if the mask's documents have another length than the layout, or keys have their own."""
        if mask.key_length is not None:
            raise ValueError(
                f"mask.key_documents describe {mask.key_length} keys: in a layout queries and keys are the same tokens; "
                "leave key_documents out, or call attention on one GPU"
            )
        if mask.length is not None and mask.length != self.length:
            raise ValueError(
                f"mask.documents describe {mask.length} positions, the layout has length={self.length}: pass the ids of the "
                "whole sequence, in natural order, on every rank"
            )

    def _padded(self, rank: int) -> list[Segment]:
        """Return the segments of all rows of a shard, padding included."""
        if not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank={rank!r}: this layout has ranks 0 to {self.ranks - 1}")
        n, ranks = self.local_length, self.ranks
        if self.ulysses > 1:
            ring_rank, ulysses_rank = divmod(rank, self.ulysses)
            return cut(self.ring._padded(ring_rank), ulysses_rank * n, (ulysses_rank + 1) * n)
        if self.kind == "striped":
            return [(rank, ranks, n)]
        if self.kind == "zigzag" and ranks > 1:
            return [(rank * n // 2, 1, n // 2), ((2 * ranks - 1 - rank) * n // 2, 1, n // 2)]
        return [(rank * n, 1, n)]

    @staticmethod
    def _check_dim(x: Tensor, dim: int, size: int, name: str) -> int:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim}: {name} has {x.ndim} dimensions; -{x.ndim} to {x.ndim - 1} work")
        dim %= x.ndim
        if x.shape[dim] != size:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: dim {dim} must be {size} long for this layout")
        return dim


def _check_fill(fill: float, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not low <= fill <= high or fill != int(fill):
        raise ValueError(f"fill={fill}: {dtype} has no such value; convert x to a dtype that has")


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _device(mask: Mask) -> torch.device:
    """Return the device of the mask's tensors. Positions on another device would make the mask move its tensors."""
    return next((t.device for t in mask.bounds()[3:] if t is not None), torch.device("cpu"))
