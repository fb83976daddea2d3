"""Values of the emulated kernels: tensors in registers, pointers, matmul results and TMA descriptors."""

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class EmulatedTensor:
    """A tensor in registers, or a scalar."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, key: Any) -> "EmulatedTensor":
        return EmulatedTensor(self.tensor[key])

    def __index__(self) -> int:
        return int(self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __neg__(self) -> "EmulatedTensor":
        return EmulatedTensor(-self.tensor)

    dtype = property(lambda self: self.tensor.dtype)
    shape = property(lambda self: list(self.tensor.shape))
    type = property(lambda self: types.SimpleNamespace(layout=None))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "EmulatedTensor":
        return EmulatedTensor(self.tensor.view(dtype) if bitcast else self.tensor.to(dtype))

    def reshape(self, shape: list[int]) -> "EmulatedTensor":
        return EmulatedTensor(self.tensor.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "EmulatedTensor":
        return EmulatedTensor(self.tensor.permute(order))

    def split(self) -> tuple["EmulatedTensor", ...]:
        return tuple(EmulatedTensor(part) for part in self.tensor.unbind(-1))


class MatmulResult(EmulatedTensor):
    """The result of an asynchronous matmul: another matmul may accumulate into it; only a wait makes it readable."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        raise AssertionError("a matmul result is read before it was waited for")


def promote(*values: Any) -> list[Tensor]:
    """Convert to the widest dtype of the register values, scalars included; Python numbers adopt it."""
    tensors = [x.tensor for x in values if isinstance(x, EmulatedTensor)]
    if not tensors:
        return [torch.as_tensor(x, dtype=torch.int32 if isinstance(x, int) else torch.float32) for x in values]
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    if any(isinstance(x, float) for x in values) and not dtype.is_floating_point:
        dtype = torch.float32
    return [x.tensor.to(dtype) if isinstance(x, EmulatedTensor) else torch.as_tensor(x, dtype=dtype) for x in values]


def lift(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Make a function of torch tensors one of emulated tensors."""
    return lambda *values: EmulatedTensor(function(*promote(*values)))


def c_division(a: Tensor, b: Tensor) -> Tensor:
    """Integer division as in C, rounded towards 0."""
    return torch.div(a, b, rounding_mode="trunc")


def _operator(function: Callable[[Tensor, Tensor], Tensor], reflected: bool = False) -> Callable[[EmulatedTensor, Any], Any]:
    apply = lift((lambda a, b: function(b, a)) if reflected else function)
    return lambda self, other: NotImplemented if isinstance(other, Pointer) else apply(self, other)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
    _function = {"floordiv": c_division, "mod": torch.fmod}.get(_name) or getattr(operator, f"__{_name}__")
    setattr(EmulatedTensor, f"__{_name}__", _operator(_function))
    setattr(EmulatedTensor, f"__r{_name}__", _operator(_function, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(EmulatedTensor, f"__{_name}__", _operator(getattr(operator, _name)))


class Pointer:
    """Addresses within the memory of one tensor; any access outside of it fails."""

    def __init__(self, memory: Tensor, addresses: Tensor, begin: int, end: int) -> None:
        self.memory, self.addresses, self.begin, self.end = memory, addresses, begin, end
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        begin, length = x.storage_offset(), 0
        if x.numel():
            length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return cls(memory, torch.tensor(begin), begin, begin + length)

    def __add__(self, offset: Any) -> "Pointer":
        offset = offset.tensor if isinstance(offset, EmulatedTensor) else offset
        return Pointer(self.memory, self.addresses + offset, self.begin, self.end)

    def load(self, mask: EmulatedTensor | None, other: Any) -> EmulatedTensor:
        addresses, ok = self._addresses(mask)
        other = other.tensor if isinstance(other, EmulatedTensor) else torch.tensor(other, dtype=self.memory.dtype)
        read = self.memory[addresses] if self.begin < self.end else other  # an empty tensor has no element to index
        return EmulatedTensor(torch.where(ok, read, other))

    def store(self, value: Any, mask: EmulatedTensor | None, rows: slice | None = None) -> None:
        addresses, ok = self._addresses(mask)
        value = value.tensor if isinstance(value, EmulatedTensor) else torch.tensor(value, dtype=self.memory.dtype)
        assert value.dtype == self.memory.dtype
        value = value.expand(addresses.shape)
        if rows is not None:
            addresses, ok, value = addresses[rows], ok[rows], value[rows]
        self.memory[addresses[ok]] = value[ok]

    def _addresses(self, mask: EmulatedTensor | None) -> tuple[Tensor, Tensor]:
        """Addresses and mask; masked addresses are replaced by a valid one."""
        addresses, ok = torch.broadcast_tensors(self.addresses, torch.tensor(True) if mask is None else mask.tensor)
        outside = ok & ((addresses < self.begin) | (addresses >= self.end))
        assert not outside.any(), (
            f"{int(addresses[outside][0]) - self.begin} is outside of a tensor's {self.end - self.begin} elements"
        )
        return torch.where(ok, addresses, self.begin), ok


class Descriptor:
    """A TMA descriptor: a tensor in blocks."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        base = descriptor.base
        self.x = torch.as_strided(base.detach(), descriptor.shape, descriptor.strides, base.storage_offset())
        self.block, self.layout, self.dtype = list(descriptor.block_shape), descriptor.layout, base.dtype
        self.block_type = types.SimpleNamespace(shape=self.block, nbytes=torch.Size(self.block).numel() * self.dtype.itemsize)

    def clip(self, coordinates: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """Return the part of the tensor that a block at these coordinates covers, and its position in the block."""
        origins = [int(x) for x in coordinates]
        assert min(origins) >= 0, origins
        sizes = [max(0, min(b, n - x)) for b, n, x in zip(self.block, self.x.shape, origins, strict=True)]
        region = self.x[tuple(slice(x, x + size) for x, size in zip(origins, sizes, strict=True))]
        return region, tuple(slice(0, size) for size in sizes)
