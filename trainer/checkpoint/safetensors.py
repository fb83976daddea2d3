"""The safetensors format: a memory-mapped reader and a streaming writer.

    8 bytes: n, little endian | n bytes of JSON: name → dtype, shape, [begin, end) | the bytes of the tensors

Nothing is unpickled. The writer knows all shapes in advance, so it writes the header first and then one tensor after the other:
a rank never holds its whole shard in memory. The SHA-256 of the file is computed while it is written.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Writer:
    """Writes a file tensor by tensor.

    Args:
        path: the file; it is replaced.
        shapes: (dtype, shape) of each tensor by name, in the order of the calls of `add`.
        metadata: text entries of the header.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (dtype, shape) in shapes.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = dict(dtype=NAMES[dtype], shape=list(shape), data_offsets=[offset, end])
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors then start at a multiple of 8, as views of a memory map require
        self._expected = list(shapes.items())
        self._hash = hashlib.sha256()
        self.size = 0
        self._file = path.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: Tensor) -> None:
        """Append the next tensor; raise a ValueError if its dtype or shape is not the announced one."""
        name, (dtype, shape) = self._expected.pop(0)
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} given, {dtype} {tuple(shape)} announced")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            self._put(flat.numpy().data)

    def close(self) -> None:
        """Flush the file to disk and close it."""
        assert not self._expected, f"{len(self._expected)} tensors were announced but not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close an incomplete file."""
        self._file.close()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes written so far."""
        return self._hash.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data) if isinstance(data, bytes) else data.nbytes


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of tensors that are all in memory."""
    writer = Writer(path, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, metadata or {})
    for x in tensors.values():
        writer.add(x)
    writer.close()


class File:
    """The tensors of a file by name. Each is a view of the memory map, so its bytes are read on use.

    Raises:
        ValueError: the file is not in this format, or is truncated.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{self.path} is no safetensors file: its header would end past its {size} bytes")
            try:
                header = json.loads(file.read(length))
            except ValueError:
                raise ValueError(f"{self.path} is no safetensors file: its header is not JSON") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries = header
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < needed:
            raise ValueError(f"{self.path} is cut short: {size} bytes of {needed}")
        self._start = 8 + length
        self._bytes = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return tuple(self._entries[name]["shape"])

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{self.path}: {name} has dtype {entry['dtype']}; {', '.join(DTYPES)} are supported")
        data = self._bytes[begin:end]
        if begin % dtype.itemsize:  # other writers may align less; a view must be aligned
            data = data.clone()
        return data.view(dtype).reshape(entry["shape"])
