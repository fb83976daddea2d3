"""What kernels count with in tests/kernels/emulator: numbers in registers, pointers, and tensors as the TMA sees them."""

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class EmulatedTensor:
    """A tensor in registers, or one number."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, at: Any) -> "EmulatedTensor":
        return EmulatedTensor(self.tensor[at])

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


class Product(EmulatedTensor):
    """Of the tensor cores. Another product may add to it; to be read it has to come out of a wait."""

    def __init__(self) -> None:
        self.ended: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        raise AssertionError("a product is read before it was waited for")


def of_one_type(*given: Any) -> list[Tensor]:
    """Of the widest type of those in registers, single numbers too; Python's own numbers take it."""
    mine = [x.tensor for x in given if isinstance(x, EmulatedTensor)]
    if not mine:
        return [torch.as_tensor(x, dtype=torch.int32 if isinstance(x, int) else torch.float32) for x in given]
    dtype = mine[0].dtype
    for x in mine[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    if any(isinstance(x, float) for x in given) and not dtype.is_floating_point:
        dtype = torch.float32
    return [x.tensor.to(dtype) if isinstance(x, EmulatedTensor) else torch.as_tensor(x, dtype=dtype) for x in given]


def on_tensors(do: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *given: EmulatedTensor(do(*of_one_type(*given)))


def whole(a: Tensor, b: Tensor) -> Tensor:
    """Divided as in C, towards 0."""
    return torch.div(a, b, rounding_mode="trunc")


def _operator(do: Callable[[Tensor, Tensor], Tensor], turned: bool = False) -> Callable[[EmulatedTensor, Any], Any]:
    apply = on_tensors((lambda a, b: do(b, a)) if turned else do)
    return lambda self, other: NotImplemented if isinstance(other, Pointer) else apply(self, other)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
    _do = {"floordiv": whole, "mod": torch.fmod}.get(_name) or getattr(operator, f"__{_name}__")
    setattr(EmulatedTensor, f"__{_name}__", _operator(_do))
    setattr(EmulatedTensor, f"__r{_name}__", _operator(_do, turned=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(EmulatedTensor, f"__{_name}__", _operator(getattr(operator, _name)))


class Pointer:
    """Into the memory of a tensor, and not beyond."""

    def __init__(self, memory: Tensor, at: Tensor, begin: int, end: int) -> None:
        self.memory, self.at, self.begin, self.end = memory, at, begin, end
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        begin, length = x.storage_offset(), 0
        if x.numel():
            length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return cls(memory, torch.tensor(begin), begin, begin + length)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(
            self.memory, self.at + (offset.tensor if isinstance(offset, EmulatedTensor) else offset), self.begin, self.end
        )

    def load(self, mask: EmulatedTensor | None, other: Any) -> EmulatedTensor:
        at, ok = self._places(mask)
        other = other.tensor if isinstance(other, EmulatedTensor) else torch.tensor(other, dtype=self.memory.dtype)
        read = self.memory[at] if self.begin < self.end else other  # of an empty tensor nothing can be read, nor is it
        return EmulatedTensor(torch.where(ok, read, other))

    def store(self, value: Any, mask: EmulatedTensor | None, rows: slice | None = None) -> None:
        at, ok = self._places(mask)
        value = value.tensor if isinstance(value, EmulatedTensor) else torch.tensor(value, dtype=self.memory.dtype)
        assert value.dtype == self.memory.dtype
        value = value.expand(at.shape)
        if rows is not None:
            at, ok, value = at[rows], ok[rows], value[rows]
        self.memory[at[ok]] = value[ok]

    def _places(self, mask: EmulatedTensor | None) -> tuple[Tensor, Tensor]:
        """Where, and which of them count; others are made harmless."""
        at, ok = torch.broadcast_tensors(self.at, torch.tensor(True) if mask is None else mask.tensor)
        outside = ok & ((at < self.begin) | (at >= self.end))
        assert not outside.any(), (
            f"{int(at[outside][0]) - self.begin} is outside of a tensor's {self.end - self.begin} elements"
        )
        return torch.where(ok, at, self.begin), ok


class Descriptor:
    """A tensor as the TMA sees it, in blocks."""

    def __init__(self, of: TensorDescriptor) -> None:
        self.x = torch.as_strided(of.base.detach(), of.shape, of.strides, of.base.storage_offset())
        self.block, self.layout, self.dtype = list(of.block_shape), of.layout, of.base.dtype
        self.block_type = types.SimpleNamespace(shape=self.block, nbytes=torch.Size(self.block).numel() * self.dtype.itemsize)

    def inside(self, at: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """Of the block there what exists, and where in the block that is."""
        places = [int(x) for x in at]
        assert min(places) >= 0, places
        sizes = [max(0, min(b, n - x)) for b, n, x in zip(self.block, self.x.shape, places, strict=True)]
        part = self.x[tuple(slice(x, x + size) for x, size in zip(places, sizes, strict=True))]
        return part, tuple(slice(0, size) for size in sizes)
