"""Tensor properties that checks, backends and transports share: accumulation dtype, row strides, 16-byte alignment."""

import functools

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=4096)
def even_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether columns are consecutive and rows begin at multiples of 8 elements, as kernels read and write them."""
    return strides[-1] == 1 and all(stride % 8 == 0 for stride, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with consecutive columns, and rows that begin at multiples of 8 elements and of 16 bytes.

    Triton knows of a stride only whether it is a multiple of 16, so kernels are told of the 8. Otherwise they would load
    element by element, which is slow, and which Triton 3.6 gets wrong on sm_90 (seen with D 248, Dv 24).
    """
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_aligned(tensor: Tensor) -> bool:
    return even_rows(tensor.shape, tensor.stride()) and (tensor.is_meta or tensor.data_ptr() % 16 == 0)
