"""Gradient return: sums of the local contribution and of what other ranks return."""

import weakref
from contextlib import nullcontext

import pytest
import torch

from ringspan.parallel import gradient_return
from ringspan.parallel.gradient_return import GradientReturn, Part
from ringspan.parallel.plan import Piece, Plan, Step
from ringspan.parallel.transport.base import SingleRankTransport
from ringspan.parallel.transport.buffers import split_gradients
from ringspan.parallel.transport.streams import Wait


class RecordingTransport(SingleRankTransport):
    """Transport that keeps weak references to the buffers that it receives into."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.recv_buffers: list[weakref.ref[torch.Tensor]] = []

    def return_gradients(self, index: int, slot: int, send_buffer: torch.Tensor, recv_buffer: torch.Tensor) -> Wait:
        self.recv_buffers.append(weakref.ref(recv_buffer.zero_()))
        return lambda: None


class RandomGradientTransport(SingleRankTransport):
    """Other ranks return random gradients."""

    def return_gradients(self, index: int, slot: int, send_buffer: torch.Tensor, recv_buffer: torch.Tensor) -> Wait:
        return lambda: recv_buffer.copy_(torch.randn_like(recv_buffer))


@pytest.mark.parametrize(
    "batch, heads, kv_heads, rows, fills",
    [
        (1, 8, 8, 8192, True),
        (1, 4, 4, 8192, False),
        (2, 4, 4, 8192, True),
        (1, 8, 8, 8000, False),
        (1, 1, 1, 65536, True),
        (1, 16, 4, 4096, True),
        (1, 16, 4, 2048, False),
        (1, 8, 1, 8192, False),
    ],
)
def test_the_local_block_has_halves_where_they_fill_the_sms(
    batch: int, heads: int, kv_heads: int, rows: int, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.9 thread blocks for each of 132 SMs need 251 tiles of 128 keys in each half; up to four thread blocks share one."""
    q, k = (torch.empty(batch, rows, n, 64, device="meta") for n in (heads, kv_heads))
    monkeypatch.setattr(gradient_return, "num_sms", lambda device: 132)
    assert gradient_return.halves_fill_sms(q, k, rows) == fills
    monkeypatch.setattr(gradient_return, "num_sms", lambda device: 0)
    assert gradient_return.halves_fill_sms(q, k, rows)


@pytest.mark.parametrize("max_kept", [1, 2, 100])
@pytest.mark.parametrize("heads, parts", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("num_keys", [0, 5, 8])
@pytest.mark.parametrize(
    "row_ranges",
    [
        [[]],
        [[slice(0, 4)]],
        [[slice(2, 5), slice(6, 8)]],
        [[slice(0, 8)] * 4],
        [[], [slice(0, 4)]],
        [[slice(0, 4)], [slice(0, 8)]],
        [[slice(0, 4), slice(0, 8)], []],
        [[slice(0, 8)] * 4, [slice(2, 4), slice(0, 8)], [slice(5, 8)]],
        [[slice(0, 4)], [slice(1, 3), slice(6, 8)], [slice(0, 8)] * 7, [slice(3, 5)]],
    ],
)
def test_remote_gradients_are_added_to_local_ones(
    heads: int,
    num_keys: int,
    parts: int,
    row_ranges: list[list[slice]],
    max_kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each once, by sums of at most MAX_SUMMANDS. Before the last kernel completes, its heads are not written."""
    rows, width = 8, 3
    sends = [[Piece(0, piece_rows, 0) for piece_rows in ranges] for ranges in row_ranges]
    local_step = Step(slice(0, rows), [], [Piece(0, slice(0, num_keys), 0)], [])
    transport = RandomGradientTransport(Plan([local_step], sends, 0, [], slice(0, 0), [], []))
    monkeypatch.setattr(gradient_return, "num_parts", lambda *_: parts)
    k, v = torch.empty(1, rows, heads, width), torch.empty(1, rows, heads, width)
    returns = GradientReturn(transport, k, k, v, "reference")
    returns.max_kept = max_kept
    # NaN must not be read: only the first half of the local contribution is in local_sums.
    returns.local_sums.fill_(torch.nan)
    returns.first_buffer().copy_(torch.randn_like(returns.first_buffer()))
    kernel_output = torch.randn_like(returns.last_buffer())
    expected = torch.zeros_like(returns.local_sums)
    for (kv_heads, half_rows), gradients in ((returns.first_half, returns.first_buffer()), (returns.last_half, kernel_output)):
        expected[half_rows, :, kv_heads] = gradients
    arrived_parts = returns._arrived_parts

    def recording() -> list[Part]:
        arrived = arrived_parts()
        for part in arrived:
            expected[part.rows, :, part.kv_heads] += part.gradients
        return arrived

    monkeypatch.setattr(returns, "_arrived_parts", recording)
    for index in range(len(row_ranges)):
        for kv_heads in returns.head_parts():
            returns.send(index, kv_heads, returns.local_sums[:0, :, kv_heads])
            assert len(returns.arrivals) <= max_kept
    grads = tuple(torch.full((1, rows, heads, width), torch.nan) for _ in range(2))
    last_sums = torch.full_like(kernel_output, torch.inf)

    def complete_kernel() -> None:
        is_last = torch.zeros(rows, heads, dtype=torch.bool)
        is_last[:, returns.last_half[0]] = returns.last_half[1] != slice(num_keys, num_keys)
        for grad in grads:
            assert grad[0].isnan().all(-1).equal(is_last) and grad[0, ~is_last].isfinite().all()
        last_sums.copy_(kernel_output)

    returns.finish(last_sums, *grads, complete_kernel)
    for grad, wanted in zip(grads, split_gradients(expected, width), strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("max_kept", [1, 2, 3])
def test_buffers_are_released_after_the_wait_for_their_sums(max_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is released earlier may be given to a kernel that runs before the sums."""
    monkeypatch.setattr(gradient_return, "num_parts", lambda *_: 1)
    k, v = torch.zeros(1, 8, 2, 3), torch.zeros(1, 8, 2, 3)
    local_step = Step(slice(0, 8), [], [Piece(0, slice(0, 8), 0)], [])
    sends = [[Piece(0, slice(0, 8), 0)]] * 8
    transport = RecordingTransport(Plan([local_step], sends, 8, [], slice(0, 0), [], []))
    returns = GradientReturn(transport, k, k, v, "reference")
    returns.max_kept = max_kept
    num_released = 0  # buffers whose sums the caller has waited for

    class Sums:
        """Stream whose completion stands for the sums of all buffers so far."""

        run = staticmethod(nullcontext)

        def completion(self) -> Wait:
            num_read = len(transport.recv_buffers)

            def wait() -> None:
                nonlocal num_released
                num_released = num_read

            return wait

    returns.sum_stream = Sums()  # type: ignore[assignment]
    for index in range(len(sends)):
        returns.send(index, slice(0, 2), returns.local_sums[:0])
        is_alive = [buffer() is not None for buffer in transport.recv_buffers]
        assert is_alive == [i >= num_released for i in range(index + 1)]
    assert num_released == (7 // max_kept - 1) * max_kept  # all sums but the last have been waited for
    returns.wait_for_sums()
    assert [buffer() is not None for buffer in transport.recv_buffers] == [i >= num_released for i in range(8)]
