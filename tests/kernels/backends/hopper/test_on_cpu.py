"""The Hopper kernels' source in the emulator, in orders of events that a GPU rarely takes."""

import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringspan import Mask, attention
from ringspan.kernels.backends.hopper import arguments as hopper_arguments
from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
from ringspan.kernels.bench import tune
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime.launch import Launch
from tests.conftest import HAS_GPU
from tests.kernels.backends.hopper.emulator import emulate
from tests.kernels.backends.test_backends import check_case
from tests.kernels.helpers.cases import CASES
from tests.kernels.helpers.dense import Case

pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU tests/kernels/test_gpu.py runs the compiled kernels")

SUPPORTED = [case for case in CASES if not case.dropout and (case.scale is None or case.scale > 0)]
MASKS = [case for case in SUPPORTED if case.width == 32 and case.scale is None]


@pytest.mark.hopper
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sweep(case: Case, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_case(case, "hopper", dtype, "cpu")


@pytest.mark.parametrize("case", MASKS, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_longer_cases_in_random_orders(case: Case, width: int, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these head dims has other tiles and warpgroup roles. Seeds are fixed, so a failing order can be repeated."""
    seed = zlib.crc32(f"{case} {width}".encode())
    emulate(monkeypatch, seed, resident=1 + seed % 4)
    longer = replace(case, width=width, v_width=None).grown(random.Random(seed).choice([2, 3, 5]))
    check_case(longer, "hopper", torch.bfloat16, "cpu")


@pytest.mark.parametrize("width, v_width", [(64, 64), (128, 104), (80, 56)])
@pytest.mark.parametrize("last", [True, False])
def test_forward_launches_each_range_of_keys(width: int, v_width: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The carry is not modified, because its lse is not overwritten. An fp32 out is stored directly, or in halves by TMA."""
    emulate(monkeypatch)
    launches: list[tuple[int, int]] = []
    run = Launch.__call__

    def record(self: Launch) -> Any:
        out = self.tensors["out"]
        launches.append((self.tensors["k"].shape[1], out.data_ptr()))
        tiles = self.make_arguments()[1]["out_tiles"]
        if width in (128, 80):
            assert tiles.block_shape[3] == (128 if width == 128 else 64) * 2 // out.element_size()
        return run(self)

    monkeypatch.setattr(Launch, "__call__", record)
    torch.manual_seed(0)
    sizes = (150, 4, width), (300, 2, width), (300, 2, v_width)
    q, k, v = (torch.randn(1, *size, dtype=torch.bfloat16) for size in sizes)
    carry = torch.randn(1, 150, 4, v_width), torch.randn(1, 4, 150)
    original_carry = [x.clone() for x in carry]
    options = Mask(causal=True), [(300, 1, 150)], [(100, 2, 100), (0, 1, 100), (101, 2, 100)], carry, last
    out, lse = block_forward(q, k, v, *options, backend="hopper")
    assert [rows for rows, _ in launches] == [100, 200]
    expected = block_forward(*(x.float() for x in (q, k, v)), *options, backend="reference")
    assert out.dtype == (torch.bfloat16 if last else torch.float32)
    torch.testing.assert_close(out.float(), expected[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=0)
    assert all(torch.equal(x, y) for x, y in zip(carry, original_carry, strict=True))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("layout", ["writable", "unaligned rows", "expanded heads"])
def test_fp32_sums_reuse_the_memory_of_an_overwritten_carry(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranges of queries within a larger tensor, as in a ring, and two of keys. No reuse if kernels cannot write there."""
    emulate(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 128, dtype=torch.float16) for rows in (150, 130, 130))
    acc = torch.randn(1, 200, 1 if layout == "expanded heads" else 2, 129 if layout == "unaligned rows" else 128)
    lse = torch.randn(1, 2, 200)
    carry = acc[:, 40:190, :, :128].expand(-1, -1, 2, -1), lse[:, :, 40:190]
    original_carry, originals = [x.clone() for x in carry], (acc.clone(), lse.transpose(1, 2).clone())
    options = Mask(), [(300, 1, 100), (0, 1, 50)], [(40, 1, 100), (0, 1, 30)]
    addresses: list[int] = []
    run = Launch.__call__

    def record(self: Launch) -> Any:
        addresses.append(self.tensors["out"].data_ptr())
        return run(self)

    monkeypatch.setattr(Launch, "__call__", record)
    into = torch.full_like(q, torch.nan), carry[1]
    block_forward(q, k, v, *options, carry, True, backend=backend, into=into)
    expected = block_forward(*(x.float() for x in (q, k, v)), *options, original_carry, True, backend="reference")
    torch.testing.assert_close(into[0].float(), expected[0], atol=1e-2, rtol=0)
    torch.testing.assert_close(into[1], expected[1], atol=1e-3, rtol=0)
    first = [carry[0][:, rows].data_ptr() for rows in (slice(0, 100), slice(100, 150))]
    assert len(addresses) == 4 and (addresses[::2] == first) == (layout == "writable")
    for x, original in zip((acc, lse.transpose(1, 2)), originals, strict=True):  # rows of other queries are untouched
        assert torch.equal(x[:, :40], original[:, :40]) and torch.equal(x[:, 190:], original[:, 190:])


def test_query_tiles_of_a_group_share_windows_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three query tiles of four heads per KV head, on as many SMs: all read the same 128 tiles of 64 KiB."""
    emulate(monkeypatch, resident=12)
    arguments: list[dict[str, Any]] = []
    run = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self: (arguments.append(self.make_arguments()[1]), run(self))[1])
    q, k = torch.randn(1, 300, 8, 128, dtype=torch.bfloat16), torch.randn(1, 130, 2, 128, dtype=torch.bfloat16)
    for mask in (Mask(), Mask(causal=True)):
        block_forward(q, k, k, mask, backend="hopper")
    assert [each["stagger"] for each in arguments] == [(128, 1, 8), None]


@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_forward_without_mask_is_bit_equal_in_any_order(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread blocks get other query tiles in each run, but the order of each tile's sums is fixed, also in a larger batch."""
    tile_bytes = 128 * 2 * 64 * 2  # of 128 keys and values
    monkeypatch.setattr(hopper_arguments, "STAGGER_BYTES", window * tile_bytes)
    monkeypatch.setattr(hopper_arguments, "PIECES_PER_START", 1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, 1, 64, dtype=torch.bfloat16) for rows in (960, 700, 700))
    results = []
    for seed in range(4):
        emulate(monkeypatch, seed, resident=2)
        batch = (x[seed % 2 :] for x in (q, k, v))  # both sequences, or the second one
        results.append([x[-1] for x in block_forward(*batch, None, last=False, backend="hopper")])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    expected = block_forward(*(x[1:].float() for x in (q, k, v)), None, backend="reference")
    torch.testing.assert_close(results[0][0], expected[0][0], atol=5e-3, rtol=0)
    torch.testing.assert_close(results[0][1], expected[1][0], atol=1e-3, rtol=0)


WRONG_ORDERS = {
    "one tile twice": lambda tile, end, start, stagger: max(int(tile), 1),
    "wraps around in the first window": lambda tile, end, start, stagger: (int(tile) + int(start) * 4 // 65536) % 4,
    "past the last tile": lambda tile, end, start, stagger: tile + start * 4 // 65536,
}


@pytest.mark.parametrize("mistake", WRONG_ORDERS)
def test_a_wrong_order_of_keys_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_arguments, "STAGGER_BYTES", 4 * 128 * 2 * 64 * 2)
    monkeypatch.setattr(hopper_arguments, "PIECES_PER_START", 1)
    emulate(monkeypatch, resident=2, staggered_tile=WRONG_ORDERS[mistake])
    with pytest.raises(AssertionError):
        check_case(Case("full", rows=960, keys=700, width=64, heads=(1, 1)), "hopper", torch.bfloat16, "cpu")


def check_staggered_backward(width: int, v_width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward whose tiles of keys read the queries in windows of four tiles, in different orders; two sequences."""
    monkeypatch.setattr(hopper_arguments, "STAGGER_BYTES", 4 * 64 * 8 * width)
    monkeypatch.setattr(hopper_arguments, "PIECES_PER_START", 1)
    torch.manual_seed(0)
    q, dout = (torch.randn(2, rows, 2, size, dtype=torch.bfloat16) for size in (width, v_width))
    k, v = (torch.randn(2, 200, 1, size, dtype=torch.bfloat16) for size in (width, v_width))
    out, lse = block_forward(*(x.float() for x in (q, k, v)), None, backend="reference")
    results = []
    for backend, inputs in (("hopper", (dout, q, k, v)), ("reference", tuple(x.float() for x in (dout, q, k, v)))):
        gradients = [torch.zeros(x.shape) for x in (q, k, v)]
        block_backward(*inputs, lse, output_delta(dout.float(), out), None, None, None, *gradients, backend=backend)
        results.append(gradients)
    for gradient, expected in zip(*results, strict=True):
        assert (gradient - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("rows", [40, 640, 700])
@pytest.mark.parametrize("width, v_width", [(256, 256), (192, 128), (160, 160)])
def test_backward_reads_all_queries_in_any_order(width: int, v_width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, seed=rows, resident=4)
    check_staggered_backward(width, v_width, rows, monkeypatch)


@pytest.mark.parametrize("mistake", WRONG_ORDERS)
def test_a_wrong_order_of_queries_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, resident=4, staggered_tile=WRONG_ORDERS[mistake])
    with pytest.raises(AssertionError):
        check_staggered_backward(256, 256, 640, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel", tune.HOPPER_CANDIDATES)
def test_all_tuner_candidates_are_correct(kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread block processes both heads, so every slot is reused."""
    emulate(monkeypatch, resident=1)
    table = hopper_tiles.FORWARD if kernel == "hopper-forward" else hopper_tiles.BACKWARD
    defaults = table[width, width]
    for tile in tune.HOPPER_CANDIDATES[kernel][width]:
        monkeypatch.setitem(table, (width, width), defaults | tile)
        check_case(Case("tile", rows=150, width=width, heads=(2, 1), causal=True), "hopper", torch.bfloat16, "cpu")


@pytest.mark.hopper
def test_unsupported_dtype_is_rejected() -> None:
    q = torch.randn(1, 10, 2, 64)
    with pytest.raises(ValueError, match=r"hopper.*bf16 and fp16 only"):
        attention(q, q, q, backend="hopper")
