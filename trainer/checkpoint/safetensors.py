"""The safetensors format: a memory-mapped reader and a streaming writer.

    8 bytes: n, little endian | n bytes of JSON: name → dtype, shape, [begin, end) | the bytes of the tensors

Nothing is unpickled. The writer knows all shapes in advance, so it writes the header first and then one tensor after the other:
a rank never holds its whole shard in memory. The SHA-256 of the file is computed while it is written.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.trainer import files

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the format's own reader has the same limit


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
        self._path, self._file = path, files.create(path)
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
        files.sync(self._file, self._path)
        self._file.close()

    def abandon(self) -> None:
        """Close an incomplete file."""
        self._file.close()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes written so far."""
        return self._hash.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        files.write(self._file, self._path, data)
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

    The header must describe the file exactly: every tensor has the bytes of its dtype and shape, and tensors cover the rest of
    the file without overlaps and gaps.

    Raises:
        OSError: the path is no regular file.
        ValueError: the file is not in this format, or is truncated.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with files.open_regular(self.path) as file:
            size = self.path.stat().st_size
            length = int.from_bytes(file.read(8) or b"", "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{self.path} is no safetensors file: its header would end past its {size} bytes")
            if length > MAX_HEADER:
                raise ValueError(
                    f"{self.path} is no safetensors file: its header has {length} bytes, at most {MAX_HEADER} are read"
                )
            try:
                header = files.parse_json(file.read(length) or b"")
            except ValueError as error:
                raise ValueError(f"{self.path} is no safetensors file: its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise ValueError(f"{self.path} is no safetensors file: its header is no JSON object")
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, Any] = header
        self._validate(size - 8 - length)
        self._start = 8 + length
        self._bytes = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)

    def _validate(self, size: int) -> None:
        """Raise a ValueError unless the header's tensors cover exactly `size` bytes, the rest of the file."""
        ends = []
        for name, entry in self._entries.items():
            try:
                dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                numbers = [*shape, begin, end]
            except (KeyError, TypeError, ValueError):
                numbers = [None]
            if any(type(x) is not int or x < 0 for x in numbers) or not isinstance(dtype, str) or not isinstance(shape, list):
                raise ValueError(f"{self.path} is no safetensors file: {name} needs dtype, shape and data_offsets")
            itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else None  # of an unknown dtype reading raises the error
            if itemsize and end - begin != math.prod(shape) * itemsize:
                raise ValueError(f"{self.path} is no safetensors file: {name} has {end - begin} bytes, not those of its shape")
            ends.append((begin, end, name))
        position = 0
        for begin, end, name in sorted(ends):
            if begin != position or end < begin:
                raise ValueError(f"{self.path} is no safetensors file: the bytes of {name} overlap others, or follow a gap")
            position = end
        if size < position:
            raise ValueError(f"{self.path} is cut short: {size} bytes of {position} after its header")
        if size > position:
            raise ValueError(f"{self.path} is no safetensors file: {size - position} bytes follow its last tensor")

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
