"""What the Hopper kernels are told, as far as that can be looked at without one."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringspan import Mask
from ringspan.kernels.backends.hopper import common as hopper_common
from ringspan.kernels.backends.hopper import forward_producer as hopper_fetch
from ringspan.kernels.backends.hopper.arguments import descriptor, heads_together
from ringspan.kernels.backends.hopper.backward_dq import apart
from ringspan.kernels.backends.hopper.common import fetchable
from ringspan.kernels.backends.triton.arguments import mask_argument
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 48, 4, 64), (1, 48, 1, 128)])
def test_a_descriptor_is_what_triton_would_make(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """(batch, head, row, column) of a part of a tensor, and for a dimension of size 1 a stride that the TMA takes."""
    batch, rows, heads, width = shape
    packed = torch.zeros(batch, 2 * rows, heads, 2 * width, dtype=dtype)
    one, other = packed[:, :rows, :, :width], packed[:, rows:, :, width:]
    strides = [one.stride(dim) if one.shape[dim] > 1 else 64 for dim in (0, 2, 1)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=4)
    for x in (one, other):
        made = descriptor(x, 40, 32, 64)
        wanted = TensorDescriptor(x, [batch, heads, 40, width], [*strides, 1], [1, 1, 32, 64], layout)
        assert type(made) is TensorDescriptor and vars(made).keys() == vars(wanted).keys()
        assert made.base is x
        assert {k: v for k, v in vars(made).items() if k != "base"} == {k: v for k, v in vars(wanted).items() if k != "base"}


def test_a_descriptor_of_what_the_tma_cannot_read_is_refused() -> None:
    x = torch.zeros(1, 48, 2, 72, dtype=torch.bfloat16)
    descriptor(x, 48, 32, 64)
    with pytest.raises(AssertionError, match="16-byte"):
        descriptor(torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape), 48, 32, 64)
    with pytest.raises(AssertionError):  # rows of 2 · 71 columns
        descriptor(torch.zeros(1, 48, 2, 71, dtype=x.dtype), 48, 32, 64)


def test_what_the_tma_cannot_read_is_copied() -> None:
    x = torch.randn(2, 9, 4, 64, dtype=torch.bfloat16)
    views = x[:, :, :1].expand(-1, -1, 4, -1), x.transpose(1, 3), x[:, :, :, 1:57], x[:, 1:].transpose(1, 2)
    for view, copied in zip(views, (True, True, True, False), strict=True):
        read = fetchable(view)
        assert (read is not view) == copied and torch.equal(read, view)
        assert read.stride(3) == 1 and 0 not in read.stride() and read.data_ptr() % 16 == 0


@pytest.mark.parametrize("width", [32, 64])
def test_dq_tiles_are_written_without_conflicts_of_banks(width: int) -> None:
    """The TMA's order (128 bytes swizzled), but for the columns of odd rows; and half a warp's stores meet in no bank."""
    bits = apart(width).offset_bases
    place = {}
    for address in range(64 * width):
        row = column = 0
        for bit, (row_bit, column_bit) in enumerate(bits):
            if address >> bit & 1:
                row, column = row ^ row_bit, column ^ column_bit
        place[row, column] = address
    assert len(place) == 64 * width
    for (row, column), address in place.items():
        stands = column ^ 16 * (row % 2)
        chunk = stands % 32 // 4 ^ row % 8  # of four columns, 16 bytes
        assert address == stands // 32 * 64 * 32 + row * 32 + chunk * 4 + stands % 4
    for first_row in range(0, 64, 4):  # of four rows, and two columns of a thread, four threads side by side
        for first in range(0, width, 8):
            banks = {place[first_row + r, first + c] % 32 for r in range(4) for c in range(8)}
            assert len(banks) == 32


@pytest.mark.parametrize("num_tiles, num_sequences, together", [(1, 1, 1), (1, 5, 2), (2, 3, 8), (7, 10, 4), (16, 24, 8)])
def test_tiles_are_given_out_once_and_heaviest_first(
    num_tiles: int, num_sequences: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = SimpleNamespace(where=lambda condition, a, b: a if condition else b, minimum=min)
    monkeypatch.setattr(hopper_common, "gl", numbers)
    everything = list(range(num_tiles * num_sequences))
    for last_apart in (False, True):
        order = [hopper_common.in_turn.fn(n, num_tiles, num_sequences, together, last_apart) for n in everything]
        assert sorted(order) == list(itertools.product(range(num_sequences), range(num_tiles)))
        for sequence in range(num_sequences):  # a deterministic backward counts on it
            assert [turn for which, turn in order if which == sequence] == list(range(num_tiles))
        groups = range(0, num_sequences, together)
        for first in groups:  # within a group all heads' tiles of one turn come before those of the next
            turns = [turn for sequence, turn in order if first <= sequence < first + together]
            assert turns == sorted(turns)
        apart = [sequence for sequence, turn in order[-num_sequences:] if turn == num_tiles - 1]
        assert not last_apart or apart == list(range(num_sequences))


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize(
    "lengths",
    [(7001, 913, 4520, 2847, 1103), (1000,), (128, 384, 512), (1, 1, 1, 300, 2, 127, 129, 5, 64), (3,) * 100, (0,)],
    ids=str,
)
def test_tiles_of_queries_begin_where_documents_do(lengths: tuple[int, ...], rows: int) -> None:
    """Every row has one tile; a document's own tiles see no other, and of their keys' tiles only the last needs the compare."""
    mask, total, keys = Mask.from_lengths(lengths, causal=True), sum(lengths), 128
    at, num_tiles = (0, 1, total, None, None, None), -(-total // rows)
    machine = EmulatedGPU(seed=0, programs=1, instead={})
    piece, what_is_seen = machine.meant(hopper_fetch.piece), machine.meant(hopper_fetch.what_is_seen)
    tiles = {}

    def look_up(work: Any) -> None:
        for index in range(num_tiles):
            b, _, row, behind = piece(EmulatedTensor(torch.tensor(index)), work, rows)
            while row < behind:
                until, *seen = what_is_seen(b, row, behind, work, rows, keys)
                tiles[int(row)] = tuple(int(x) for x in (until, *seen))
                row = until

    machine.run(look_up, dict(work=(mask_argument(mask.bounds()), at, at, num_tiles, 1, 1, 1, 1)), resident=1)
    ends = sorted(until for until, *_ in tiles.values())
    assert [0, *ends] == [*sorted(tiles), total]
    assert all(row < until <= row + rows for row, (until, *_) in tiles.items())
    first = 0
    for length in lengths:
        for row in range(first, first + length - rows + 1, rows) if length >= 2 * rows else ():
            last_key = -(-(row + rows - first) // keys)
            assert tiles[row] == (row + rows, first, 0, 0, (row + 1 - first) // keys, last_key)
        first += length


def test_heads_go_together_in_whole_groups() -> None:
    causal, full = mask_argument(Mask(causal=True).bounds()), mask_argument(Mask().bounds())
    documents = mask_argument(Mask(causal=True, documents=[0, 0, 1]).bounds())
    for way, many in (("forward", 1), ("backward", 2)):  # of which not even one fits
        assert heads_together(way, causal, 128, 2**30, 1) == many and heads_together(way, causal, 128, 2**30, 4) == 4 * many
    for way in ("forward", "backward"):
        assert heads_together(way, causal, 128, 2**24, 1) == 2 and heads_together(way, causal, 128, 2**18, 1) == 64
        assert heads_together(way, documents, 128, 2**30, 1) == 8
        assert heads_together(way, full, 128, 2**18, 4) == 4 and heads_together(way, full, 256, 2**30, 1) == 1
    assert heads_together("forward", causal, 256, 2**30, 1) == 1 and heads_together("backward", causal, 256, 2**30, 1) == 8
