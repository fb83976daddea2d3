"""Properties of tensors and devices, shared by backends and transports: accumulation dtype, row strides, alignment, SMs."""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

INF = float("inf")


_NO_CONTEXT = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is current: kernels, streams, events and signals belong to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else _NO_CONTEXT


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the carry, the statistics and the gradient sums: fp64 for fp64 inputs, fp32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def can_read(x: Tensor) -> bool:
    """Return whether the host can read a tensor's contents: it is on the CPU, and neither fake nor traced by a compiler."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 0 for another device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.lru_cache(maxsize=4096)
def even_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether columns are consecutive and rows begin at multiples of 8 elements, as kernels read and write them."""
    return strides[-1] == 1 and all(stride % 8 == 0 for stride, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, with consecutive columns and rows that begin at multiples of 8 elements and 16 bytes.

    Triton's specialisation only records whether 16 divides a stride, so kernels assume a multiple of 8 explicitly.
    Otherwise they load element by element: slow, and wrong with Triton 3.6 on sm_90 (seen with D 248, Dv 24).
    """
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def aligned_stats(tensor: Tensor) -> Tensor:
    """Return lse or delta (B, H, S), or a copy, with consecutive rows, the first of each head at a multiple of 16 bytes.

    Their tiles are then loaded in vectors, by one kernel for all lengths. Most need no copy.
    """
    per_vector = 16 // tensor.element_size()
    *outer, last = tensor.stride()
    if last == 1 and not any(x % per_vector for x in outer) and (tensor.is_meta or tensor.data_ptr() % 16 == 0):
        return tensor
    *sizes, rows = tensor.shape
    return tensor.new_empty(*sizes, -(-rows // per_vector) * per_vector)[..., :rows].copy_(tensor)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether kernels can read the tensor without a copy (see `aligned`)."""
    return even_rows(tensor.shape, tensor.stride()) and (tensor.is_meta or tensor.data_ptr() % 16 == 0)
