"""Host code of the Hopper kernels: TMA descriptors, tile order, document tiles and concurrent heads."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringspan import Mask
from ringspan.kernels.backends.hopper import common as hopper_common
from ringspan.kernels.backends.hopper import forward_producer as forward_producer
from ringspan.kernels.backends.hopper.argument_tuples import QueryWork, Stagger
from ringspan.kernels.backends.hopper.arguments import descriptor, num_concurrent_groups, stagger
from ringspan.kernels.backends.hopper.backward_dq import staggered_layout
from ringspan.kernels.backends.hopper.common import tma_readable
from ringspan.kernels.backends.triton.arguments import mask_argument, segments_argument
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor

CAUSAL, DOCUMENTS = Mask(causal=True), Mask(causal=True, documents=[0, 0, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 48, 4, 64), (1, 48, 1, 128)])
def test_descriptor_equals_tritons(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """For a slice of a tensor; a dimension of size 1 gets a stride that the TMA accepts."""
    batch, rows, heads, width = shape
    tensor = torch.zeros(batch, 2 * rows, heads, 2 * width, dtype=dtype)
    left, right = tensor[:, :rows, :, :width], tensor[:, rows:, :, width:]
    strides = [left.stride(dim) if left.shape[dim] > 1 else 64 for dim in (0, 2, 1)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=4)
    for view in (left, right):
        result = descriptor(view, 40, 32, 64)
        expected = TensorDescriptor(view, [batch, heads, 40, width], [*strides, 1], [1, 1, 32, 64], layout)
        assert type(result) is TensorDescriptor and vars(result).keys() == vars(expected).keys()
        assert result.base is view
        fields, expected_fields = ({k: v for k, v in vars(x).items() if k != "base"} for x in (result, expected))
        assert fields == expected_fields


def test_descriptor_rejects_tensors_that_the_tma_cannot_read() -> None:
    x = torch.zeros(1, 48, 2, 72, dtype=torch.bfloat16)
    descriptor(x, 48, 32, 64)
    with pytest.raises(AssertionError, match="16-byte"):
        descriptor(torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape), 48, 32, 64)
    with pytest.raises(AssertionError):  # rows of 2 · 71 columns
        descriptor(torch.zeros(1, 48, 2, 71, dtype=x.dtype), 48, 32, 64)


def test_tma_readable_copies_only_what_the_tma_cannot_read() -> None:
    x = torch.randn(2, 9, 4, 64, dtype=torch.bfloat16)
    views = x[:, :, :1].expand(-1, -1, 4, -1), x.transpose(1, 3), x[:, :, :, 1:57], x[:, 1:].transpose(1, 2)
    for view, copied in zip(views, (True, True, True, False), strict=True):
        result = tma_readable(view)
        assert (result is not view) == copied and torch.equal(result, view)
        assert result.stride(3) == 1 and 0 not in result.stride() and result.data_ptr() % 16 == 0


@pytest.mark.parametrize("width", [32, 64])
def test_dq_tiles_are_stored_without_bank_conflicts(width: int) -> None:
    """The layout is the TMA's (128-byte swizzle) with swapped columns in odd rows; half a warp's stores use distinct banks."""
    bits = staggered_layout(width).offset_bases
    address_of = {}
    for address in range(64 * width):
        row = column = 0
        for bit, (row_bit, column_bit) in enumerate(bits):
            if address >> bit & 1:
                row, column = row ^ row_bit, column ^ column_bit
        address_of[row, column] = address
    assert len(address_of) == 64 * width
    for (row, column), address in address_of.items():
        stored_column = column ^ 16 * (row % 2)
        bank_group = stored_column % 32 // 4 ^ row % 8  # of four columns, 16 bytes
        assert address == stored_column // 32 * 64 * 32 + row * 32 + bank_group * 4 + stored_column % 4
    for first_row in range(0, 64, 4):  # four rows of four threads with two columns each
        for first in range(0, width, 8):
            banks = {address_of[first_row + r, first + c] % 32 for r in range(4) for c in range(8)}
            assert len(banks) == 32


@pytest.mark.parametrize(
    "num_tiles, num_sequences, concurrent_heads", [(1, 1, 1), (1, 5, 2), (2, 3, 8), (7, 10, 4), (16, 24, 8)]
)
def test_tiles_are_scheduled_once_and_heaviest_first(
    num_tiles: int, num_sequences: int, concurrent_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    language = SimpleNamespace(where=lambda condition, a, b: a if condition else b, minimum=min)
    monkeypatch.setattr(hopper_common, "gl", language)
    indices = list(range(num_tiles * num_sequences))
    for defer_last in (False, True):
        order = [hopper_common.scheduled_tile.fn(n, num_tiles, num_sequences, concurrent_heads, defer_last) for n in indices]
        assert sorted(order) == list(itertools.product(range(num_sequences), range(num_tiles)))
        for sequence in range(num_sequences):  # a deterministic backward relies on this order
            assert [tile for other_sequence, tile in order if other_sequence == sequence] == list(range(num_tiles))
        groups = range(0, num_sequences, concurrent_heads)
        for first in groups:  # within a group tile i of all heads precedes tile i + 1
            tiles_in_order = [tile for sequence, tile in order if first <= sequence < first + concurrent_heads]
            assert tiles_in_order == sorted(tiles_in_order)
        deferred = [sequence for sequence, tile in order[-num_sequences:] if tile == num_tiles - 1]
        assert not defer_last or deferred == list(range(num_sequences))


@pytest.mark.parametrize("end", [0, 1, 7, 8, 9, 16, 30])
@pytest.mark.parametrize(
    "window, num_starts, pieces_per_start", [(1, 1, 8), (8, 2, 8), (8, 8, 1), (4, 16, 2), (64, 16, 8), (32, 5, 8)]
)
def test_each_piece_of_work_reads_each_tile_of_a_window_once(
    end: int, window: int, num_starts: int, pieces_per_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    language = SimpleNamespace(where=lambda condition, a, b: a if condition else b, minimum=min)
    monkeypatch.setattr(hopper_common, "gl", language)
    stagger, first_tiles = Stagger(window, num_starts, pieces_per_start), set()
    for piece in range(3 * num_starts * pieces_per_start):
        start = hopper_common.start_in_window.fn(piece, stagger)
        tiles = [hopper_common.staggered_tile.fn(tile, end, start, stagger) for tile in range(end + 1)]
        assert tiles[end] == end  # a partial tile
        for first in range(0, end, window):
            last = min(first + window, end)
            assert sorted(tiles[first:last]) == list(range(first, last))
            in_order = [*range(tiles[first], last), *range(first, tiles[first])]
            assert tiles[first:last] == in_order
        first_tiles.add((piece // pieces_per_start % num_starts, tiles[0]))
    length = min(window, max(end, 1))
    assert sorted(first_tiles) == [(n, (n * 65536 // num_starts) * length // 65536) for n in range(num_starts)]
    ends = [*sorted(tile for _, tile in first_tiles), length]
    assert max(b - a for a, b in itertools.pairwise(ends)) <= -(-length // num_starts) + 1  # evenly spread


@pytest.mark.parametrize(
    "pieces, tile_bytes, expected",
    [
        (32, 2**16, (16, 4, 8)),  # the tiles of four heads are in progress on 132 SMs: 31 tiles each, and a power of two
        (128, 2**16, (64, 16, 8)),
        (512, 2**16, (128, 16, 8)),  # as many as there are SMs
        (4, 2**16, (2, 1, 8)),
        (1, 2**20, (1, 1, 8)),
    ],
)
def test_windows_of_all_heads_in_progress_fit_the_cache(pieces: int, tile_bytes: int, expected: tuple[int, ...]) -> None:
    assert stagger(pieces, tile_bytes, torch.device("cpu")) == expected


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize(
    "lengths",
    [(7001, 913, 4520, 2847, 1103), (1000,), (128, 384, 512), (1, 1, 1, 300, 2, 127, 129, 5, 64), (3,) * 100, (0,)],
    ids=str,
)
def test_query_tiles_begin_at_document_borders(lengths: tuple[int, ...], rows: int) -> None:
    """Each row is in one tile. Full tiles of a document see no other document, and only their last key tile is partial."""
    mask, total, keys = Mask.from_lengths(lengths, causal=True), sum(lengths), 128
    at, num_tiles = segments_argument(((0, 1, total),)), -(-total // rows)
    machine = EmulatedGPU(seed=0, num_blocks=1, overrides={})
    work_piece = machine.translate(forward_producer.work_piece)
    visible_key_tiles = machine.translate(forward_producer.visible_key_tiles)
    tiles = {}

    def collect_tiles(work: Any) -> None:
        for index in range(num_tiles):
            b, _, row, piece_end = work_piece(EmulatedTensor(torch.tensor(index)), work, rows)
            while row < piece_end:
                tile_end, *key_tiles = visible_key_tiles(b, row, piece_end, work, rows, keys)
                tiles[int(row)] = tuple(int(x) for x in (tile_end, *key_tiles))
                row = tile_end

    machine.run(
        collect_tiles, dict(work=QueryWork(mask_argument(mask.bounds()), at, at, num_tiles, 1, 1, 1, 1, None)), resident=1
    )
    ends = sorted(tile_end for tile_end, *_ in tiles.values())
    assert [0, *ends] == [*sorted(tiles), total]
    assert all(row < tile_end <= row + rows for row, (tile_end, *_) in tiles.items())
    first = 0
    for length in lengths:
        for row in range(first, first + length - rows + 1, rows) if length >= 2 * rows else ():
            last_key = -(-(row + rows - first) // keys)
            assert tiles[row] == (row + rows, first, 0, 0, (row + 1 - first) // keys, last_key)
        first += length


@pytest.mark.parametrize(
    "direction, mask, block_n, num_groups, rows, streamed_bytes, count",
    [  # shapes of docs/results/concurrent-heads-h200.json have the fastest count, or an at most 4 % slower one
        ("backward", CAUSAL, 128, 8, 4096, 2**24, 4),
        ("backward", CAUSAL, 128, 32, 2048, 2**23, 8),
        ("backward", CAUSAL, 128, 8, 5000, 2**24, 4),
        ("backward", CAUSAL, 128, 16, 3000, 2**24, 8),  # six are a wave, but two of 16 would be left
        ("backward", CAUSAL, 128, 8, 6144, 2**25, 4),
        ("backward", CAUSAL, 128, 32, 4096, 2**22, 4),
        ("backward", CAUSAL, 128, 256, 512, 2**21, 16),
        ("backward", CAUSAL, 128, 16, 16384, 2**24, 2),
        ("backward", CAUSAL, 128, 16, 2**17 + 1, 2**30, 1),
        ("backward", CAUSAL, 64, 16, 8192, 2**30, 8),
        ("backward", DOCUMENTS, 128, 8, 16384, 2**26, 8),
        ("backward", Mask(), 128, 16, 8192, 2**20, 1),
        ("forward", CAUSAL, 128, 32, 4096, 4096 * 384, 16),  # ten fit into the cache, and two of 32 would be left
        ("forward", CAUSAL, 128, 16, 4096, 4096 * 640, 8),
        ("forward", CAUSAL, 128, 16, 8192, 8192 * 512, 4),
        ("forward", CAUSAL, 128, 13, 8192, 8192 * 512, 7),
        ("forward", CAUSAL, 128, 16, 65536, 2**25, 1),
        ("forward", Mask(), 128, 16, 8192, 2**20, 1),
        ("forward", CAUSAL, 128, 0, 8192, 2**20, 1),
    ],
)  # fmt: skip
def test_the_last_heads_are_about_as_many_as_the_others(
    direction: str, mask: Mask, block_n: int, num_groups: int, rows: int, streamed_bytes: int, count: int
) -> None:
    tiles = -(-rows // block_n)
    rules = mask_argument(mask.bounds())
    assert num_concurrent_groups(direction, rules, block_n, num_groups, tiles, rows, streamed_bytes, 132) == count
