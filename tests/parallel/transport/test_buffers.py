"""Transfer buffers: copies of rows that are not contiguous."""

import pytest
import torch

from ringspan.parallel.transport.buffers import contiguous_rows


@pytest.mark.parametrize("width, start, is_aligned", [(16, 0, True), (24, 0, True), (20, 0, False), (16, 2, False)])
def test_aligned_rows_are_copied_in_elements_of_16_bytes(
    width: int, start: int, is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If offsets and strides are multiples of 16 bytes. Contiguous rows are not copied."""
    heads = torch.randn(5, 1, 4, width + start).bfloat16()[:, :, 1:3, start:]
    copied: list[torch.dtype] = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: copied.append(x.dtype) or contiguous(x))
    rows = contiguous_rows(heads)
    assert copied == [torch.complex128 if is_aligned else torch.bfloat16]
    assert rows.is_contiguous() and torch.equal(rows, heads) and contiguous_rows(rows) is rows
