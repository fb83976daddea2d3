"""Head dims in two chunks: values with all masks, GQA and carry, and faults in the handling of chunks that the tests find."""

import itertools
import zlib
from functools import partial
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ringspan import Mask
from ringspan.kernels.backends.hopper import tile_sizes
from ringspan.kernels.backends.hopper.backward_consumer import fence_and_arrive
from ringspan.kernels.backends.hopper.backward_consumer import store_columns as store_gradients
from ringspan.kernels.backends.hopper.backward_consumer_dq import add_middle_part, add_part
from ringspan.kernels.backends.hopper.backward_consumer_dq import dq_part as consumer_dq_part
from ringspan.kernels.backends.hopper.chunks import accumulate_chunk
from ringspan.kernels.backends.hopper.forward_outputs import load_carry_chunk as load_carry
from ringspan.kernels.backends.hopper.forward_outputs import store_out_chunk as store_out
from ringspan.kernels.backends.hopper.tile_sizes import chunks
from ringspan.kernels.blocks import block_backward, block_forward
from ringspan.kernels.runtime.triton_compat import tma_load
from tests.conftest import HAS_GPU
from tests.kernels.backends.hopper.emulator import emulate
from tests.kernels.backends.hopper.emulator.language import Language
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU
from tests.kernels.backends.hopper.emulator.memory import Barrier
from tests.kernels.backends.test_backends import check_case
from tests.kernels.helpers.cases import CHUNKED, CHUNKED_CASES, two_blocks
from tests.kernels.helpers.dense import Case
from tests.kernels.runtime.ahead import CHIPS

emulated = pytest.mark.skipif(HAS_GPU, reason="with a GPU tests/kernels/test_gpu.py runs the compiled kernels")


def test_chunks_of_head_dims() -> None:
    expected = {16: (64, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 104: (128, 0), 112: (128, 0), 128: (128, 0)}
    expected |= {136: (128, 16), 160: (128, 32), 192: (128, 64), 200: (256, 0), 256: (256, 0)}
    assert {width: chunks(width) for width in expected} == expected
    assert all(sum(chunks(width)) >= width for width in range(1, 257))


@pytest.mark.parametrize("width, consumers", [(80, [3, 3, 3, 3]), (96, [2, 2, 3, 3]), (112, [2, 3, 3, 3]), (128, [2, 2, 2, 2])])
def test_short_windows_take_tiles_of_fewer_queries(width: int, consumers: list[int]) -> None:
    x = torch.empty(1, 8192, 1, width, device="meta")
    masks = [Mask(window=(1000, 1047)), Mask(causal=True, window=4096), Mask(causal=True, window=4097), Mask(causal=True)]
    assert [tile_sizes.tiles_for("forward", x, x, mask.bounds())["CONSUMERS"] for mask in masks] == consumers


@emulated
@pytest.mark.parametrize("case", CHUNKED_CASES, ids=str)
def test_masks_with_head_dims_in_chunks(case: Case, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = zlib.crc32(str(case).encode())
    if seed % 2:  # every window is a long one
        monkeypatch.setattr(tile_sizes, "SHORT_WINDOWS", {})
    emulate(monkeypatch, seed, resident=1 + seed % 4)
    check_case(case.grown(3), "hopper", torch.bfloat16 if seed % 3 else torch.float16, "cpu")


@pytest.mark.parametrize(
    "width, v_width, needs_registers, by_consumers",
    [
        *[(128, 160, False, False), (136, 136, False, True), (160, 160, False, True), (168, 128, False, True)],
        *[(192, 128, False, True), (192, 136, False, False), (192, 128, True, False), (256, 256, False, False)],
    ],
)
def test_consumers_compute_dq_where_registers_suffice(
    width: int, v_width: int, needs_registers: bool, by_consumers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, v = (torch.empty(1, 64, 1, x, device="meta") for x in (width, v_width))
    for compiler_suffices in (True, False):
        monkeypatch.setattr(tile_sizes, "CONSUMERS_COMPUTE_DQ", compiler_suffices)
        tiles = tile_sizes.tiles_for("backward", q, v, needs_registers=needs_registers)
        expected = (False, 128) if by_consumers and compiler_suffices else (True, 64)
        assert (tiles["DQ_WARPGROUP"], tiles["BLOCK_N"]) == expected


@emulated
@pytest.mark.parametrize("width, v_width", [(136, 136), (144, 64), (176, 96)])
def test_narrow_last_parts_of_dq(width: int, v_width: int, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, width, resident=2)
    case = Case("causal", rows=150, keys=200, heads=(4, 2), width=width, v_width=v_width, causal=True, window=90)
    check_case(case, "hopper", torch.bfloat16, "cpu")


@pytest.mark.hopper
@pytest.mark.parametrize("head_dims", CHUNKED, ids=str)
def test_carry_with_head_dims_in_chunks(head_dims: tuple[int, int], device: str) -> None:
    for value, expected in zip(
        two_blocks(head_dims, "hopper", device), two_blocks(head_dims, "reference", device), strict=True
    ):
        torch.testing.assert_close(value.float(), expected, atol=4e-2, rtol=2e-2)
        assert (value - expected).norm() <= 0.005 * expected.norm()


@gluon.jit
def scores_of_second_chunk_twice(left, right, zero, WIDTH: gl.constexpr):
    product = warpgroup_mma(left[-1], right[-1].permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(left[1], right[1].permute((1, 0)), product, is_async=True) if len(left) == 2 else product


@gluon.jit
def scores_without_first_chunk(left, right, zero, WIDTH: gl.constexpr):
    for chunk, other in zip(left, right, strict=True):
        product = warpgroup_mma(chunk, other.permute((1, 0)), zero, use_acc=False, is_async=True)
    return product


@gluon.jit
def sums_without_second_chunk(weights, right, acc):
    first = accumulate_chunk(weights, right[0], acc[0])
    return first, accumulate_chunk(weights * 0, right[1], acc[1])


@gluon.jit
def sums_of_first_chunk_twice(weights, right, acc):
    first = accumulate_chunk(weights, right[0], acc[0])
    return first, accumulate_chunk(weights, right[0].slice(0, acc[1].shape[1], dim=1), acc[1])


@gluon.jit
def loads_at_wrong_column(descriptors, b, h, row, full, tiles, slot):
    tma_load(descriptors[0], [b, h, row, 0], full, tiles[0].index(slot))
    if len(descriptors) == 2:
        tma_load(descriptors[1], [b, h, row, descriptors[0].block_type.shape[3] - 8], full, tiles[1].index(slot))


@gluon.jit
def no_load_of_second_chunk(descriptors, b, h, row, full, tiles, slot):
    tma_load(descriptors[0], [b, h, row, 0], full, tiles[0].index(slot))


@gluon.jit
def scores_with_last_columns_from(left, right, zero, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    left, right = left[0], right[0]
    product = warpgroup_mma(left.slice(0, 64, 1), right.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    product = warpgroup_mma(left.slice(64, 32, 1), right.slice(64, 32, 1).permute((1, 0)), product, is_async=True)
    return warpgroup_mma(left.slice(LEFT, 16, 1), right.slice(RIGHT, 16, 1).permute((1, 0)), product, is_async=True)


@gluon.jit
def scores_of_columns_80_to_95_twice(left, right, zero, WIDTH: gl.constexpr):
    return scores_with_last_columns_from(left, right, zero, 80, 80)


@gluon.jit
def scores_of_wrong_columns(left, right, zero, WIDTH: gl.constexpr):
    return scores_with_last_columns_from(left, right, zero, 96, 80)


@gluon.jit
def dq_of_first_chunk_twice(ds, k_all, part, zero, BLOCK_D: gl.constexpr):
    if part < BLOCK_D // 64:
        return warpgroup_mma(ds, k_all[0].slice(part * 64, 64, dim=1), zero[0], use_acc=False, is_async=True)
    else:
        return warpgroup_mma(ds, k_all[0].slice(0, zero[1].shape[1], dim=1), zero[1], use_acc=False, is_async=True)


@gluon.jit
def dq_of_second_part_twice(ds_halves, k, PART: gl.constexpr, flags: gl.constexpr):
    return consumer_dq_part(ds_halves, (k[0], k[0].slice(64, 64, dim=1)), PART, flags)


@gluon.jit
def dq_of_one_consumer_twice(ds_halves, k, PART: gl.constexpr, flags: gl.constexpr):
    return consumer_dq_part((ds_halves[0], ds_halves[0]), k, PART, flags)


@gluon.jit
def middle_part_of_one_consumer(ds_halves, k, dq_out, memory, tile, step, h, row, scale, flags, CONSUMER_ID: gl.constexpr):
    if CONSUMER_ID == 0:
        add_middle_part(ds_halves, k, dq_out, memory, tile, step, h, row, scale, flags, CONSUMER_ID)


@gluon.jit
def part_at_wrong_column(dq_out, memory, tile, h, row, PART: gl.constexpr, CONSUMER_ID: gl.constexpr):
    add_part(dq_out, memory, tile, h, row, PART - 1 if PART > 0 else 0, CONSUMER_ID)


@gluon.jit
def ds_without_wait(memory, barriers, step, flags: gl.constexpr):
    first, second = step % flags.DS_STAGES, flags.DS_STAGES + step % (flags.DS_STAGES - 1)
    return memory.ds.index(first).permute((1, 0)), memory.ds.index(second).permute((1, 0))


@gluon.jit
def store_ds_without_wait(ds, memory, barriers, i, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    slot = i % (flags.DS_STAGES - CONSUMER_ID)
    memory.ds.index(flags.DS_STAGES * CONSUMER_ID + slot).store(ds)
    fence_and_arrive(barriers.ds_full[CONSUMER_ID].index(slot))


@gluon.jit
def out_at_wrong_column(out, stride, row, row_ok, acc, FIRST: gl.constexpr, DV: gl.constexpr):
    store_out(out, stride, row, row_ok, acc, FIRST - 8 if FIRST > 0 else 0, DV)


@gluon.jit
def carry_at_wrong_column(carry_out, strides, b, h, row, row_ok, like, FIRST: gl.constexpr, DV: gl.constexpr):
    return load_carry(carry_out, strides, b, h, row, row_ok, like, FIRST - 8 if FIRST > 0 else 0, DV)


@gluon.jit
def gradients_at_wrong_column(value, pointer, strides, b, h, row, row_ok, FIRST, COLUMNS: gl.constexpr, ADD: gl.constexpr):
    store_gradients(value, pointer, strides, b, h, row, row_ok, FIRST - 8 if FIRST > 0 else 0, COLUMNS, ADD)


@gluon.jit
def first_chunk_as_tail(matrices, LAYOUT: gl.constexpr):
    return matrices[0].load(LAYOUT), matrices[0].slice(0, matrices[1].shape[1], dim=1).load(LAYOUT)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {  # name: (other meanings in the kernels, the first wrong result)
    "scores: a chunk left out": (dict(multiply_transposed=scores_without_first_chunk), "out"),
    "scores: a chunk used twice": (dict(multiply_transposed=scores_of_second_chunk_twice), "out"),
    "sums: a chunk left out": (dict(accumulate=sums_without_second_chunk), "out"),
    "sums: a chunk used twice": (dict(accumulate=sums_of_first_chunk_twice), "out"),
    "loads: a wrong offset": (dict(load_tiles=loads_at_wrong_column), "out"),
    "loads: a chunk left out": (dict(load_tiles=no_load_of_second_chunk), "all tasks wait"),
    "out: a wrong offset": (dict(store_out_chunk=out_at_wrong_column), "out"),
    "carry: a wrong offset": (dict(load_carry_chunk=carry_at_wrong_column), "out"),
    "dk, dv: a wrong offset": (dict(store_columns=gradients_at_wrong_column), "dk"),
}
FAULTS_OF_V = [name for name in FAULTS if name.startswith(("sums", "out", "carry"))]
FAULTS_OF_DQ_WARPGROUP = {"dq: a chunk used twice": (dict(dq_matmul=dq_of_first_chunk_twice), "dq")}
FAULTS_OF_96 = {
    **FAULTS_OF_DQ_WARPGROUP,
    "k in registers: a chunk used twice": (dict(load_operand=first_chunk_as_tail), "dq"),
}
FAULTS_OF_192 = {  # consumers compute dq
    "dq: a chunk used twice": (dict(dq_part=dq_of_second_part_twice), "dq"),
    "dq: dS of one consumer used twice": (dict(dq_part=dq_of_one_consumer_twice), "dq"),
    "dq: a part left out": (dict(add_middle_part=middle_part_of_one_consumer), "dq"),
    "dq: a wrong offset": (dict(add_part=part_at_wrong_column), "dq"),
    "dS: no wait until it is stored": (dict(wait_ds=ds_without_wait), "dq"),
    "dS: no wait for a free slot": (dict(store_ds=store_ds_without_wait), "all tasks wait"),
}
FAULTS_OF_112 = {
    "scores: columns used twice": (dict(multiply_transposed=scores_of_columns_80_to_95_twice), "out"),
    "scores: a wrong offset": (dict(multiply_transposed=scores_of_wrong_columns), "out"),
}


@emulated
@pytest.mark.parametrize(
    "head_dims, fault",
    [
        *itertools.product([(96, 96)], [*FAULTS, *FAULTS_OF_96]),
        *itertools.product([(160, 160)], FAULTS_OF_V),
        *itertools.product([(192, 128)], [*(name for name in FAULTS if name not in FAULTS_OF_V), *FAULTS_OF_192]),
        *itertools.product([(112, 112)], FAULTS_OF_112),
        *itertools.product([(192, 192)], FAULTS_OF_DQ_WARPGROUP),
    ],
    ids=str,
)
def test_wrong_chunks_are_found(fault: str, head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault changes the results that depend on it, and only those."""
    others = {(96, 96): FAULTS_OF_96, (112, 112): FAULTS_OF_112, (192, 128): FAULTS_OF_192, (192, 192): FAULTS_OF_DQ_WARPGROUP}
    overrides, first_wrong = (FAULTS | others.get(head_dims, {}))[fault]
    expected = two_blocks(head_dims, "reference", "cpu")
    emulate(monkeypatch, **overrides)
    if first_wrong == "all tasks wait":
        with pytest.raises(AssertionError, match=first_wrong):
            two_blocks(head_dims, "hopper", "cpu")
        return
    results = two_blocks(head_dims, "hopper", "cpu")
    wrong = [
        name
        for name, value, x in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True)
        if not (value - x).norm() <= 0.005 * x.norm()
    ]
    assert wrong and wrong[0] == first_wrong


class Allocated(AssertionError):
    """Ends an emulated kernel once it has allocated its tiles."""


@emulated
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 144, 160, 192, 256])
def test_tiles_of_all_head_dims_fit_into_shared_memory(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `backend="hopper"` takes every head dim. 2 KB remain for barriers and the compiler's scratch memory."""
    limit = CHIPS["sm_90"] - 2048
    allocate, num_bytes = Language.allocate_shared_memory, 0

    def count(self: Language, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        nonlocal num_bytes
        num_bytes += 0 if layout is Barrier else torch.Size(shape).numel() * dtype.itemsize
        return allocate(self, dtype, shape, layout)

    def end(*_: Any) -> None:
        raise Allocated

    monkeypatch.setattr(Language, "allocate_shared_memory", count)
    monkeypatch.setattr(EmulatedGPU, "warp_specialize", end)
    emulate(monkeypatch, resident=1)
    for v_width in (64, 80, 96, 112, 128, 144, 160, 192, 256):
        q, k, v, dout = (torch.zeros(1, 64, 1, n, dtype=torch.bfloat16) for n in (width, width, v_width, v_width))
        lse = torch.zeros(1, 1, 64)
        sums = [torch.zeros(x.shape) for x in (q, k, v)]
        options = dict(softcap=9.0, backend="hopper")
        masks = None, Mask(window=9)
        calls = [partial(block_forward, q, k, v, mask, last=last, **options) for last in (True, False) for mask in masks]
        calls.append(partial(block_backward, dout, q, k, v, lse, lse, None, None, None, *sums, **options))
        for call in calls:
            num_bytes = 0
            with pytest.raises(Allocated):
                call()
            assert 0 < num_bytes <= limit, (width, v_width)
