"""The safetensors format: a length, a JSON header, and the tensors' bytes. Read by memory map, written as a stream.

    8 bytes: n, little endian | n bytes of JSON: name → dtype, shape, [begin, end) | the bytes

Nothing is unpickled. A writer knows every shape beforehand, so the header comes first and the tensors follow one by one,
each as soon as it is there: a rank never holds its whole shard in memory. The SHA-256 of the file falls out of the writing.
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
    """Takes the tensors in the order of `shapes`; `digest` and `size` are the file's once it is closed."""

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
        text += b" " * (-len(text) % 8)  # the bytes then start at a multiple of 8, which a memory map wants
        self._waiting = list(shapes.items())
        self._hash = hashlib.sha256()
        self.size = 0
        self._file = path.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: Tensor) -> None:
        name, (dtype, shape) = self._waiting.pop(0)
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} given, {dtype} {tuple(shape)} announced")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            self._put(memoryview(flat.numpy()))

    def close(self) -> None:
        """The bytes are on the disk when this returns."""
        assert not self._waiting, f"{len(self._waiting)} tensors were announced and never given"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data) if isinstance(data, bytes) else data.nbytes


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A whole file at once, for tensors that are all there."""
    writer = Writer(path, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, metadata or {})
    for x in tensors.values():
        writer.add(x)
    writer.close()


class File:
    """A file's tensors by name, each a view of the file: its bytes are read when they are used."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{self.path} is no safetensors file: its header would reach beyond its {size} bytes")
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
        return tuple(self._entries[name]["shape"])

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{self.path}: {name} has dtype {entry['dtype']}; {', '.join(DTYPES)} are read")
        data = self._bytes[begin:end]
        if begin % dtype.itemsize:  # a foreign file may be aligned to less; a view may not
            data = data.clone()
        return data.view(dtype).reshape(entry["shape"])
