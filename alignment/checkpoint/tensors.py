"""safetensors files written in chunks with a checksum, and read by interval: no file is ever entirely in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.checkpoint.manifest import FileRecord
from alignment.config.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a safetensors file and flush it to disk.

    ``safetensors.torch.save_file`` copies every tensor into one buffer before it writes; this function copies at most
    64 MiB at a time, also from a device. Only non-contiguous tensors are copied entirely.

    Args:
        path: the file, which is overwritten in place if it exists; write to a folder that has no readers yet.
        tensors: tensors by name, of any shape and device.
        metadata: strings by name.

    Raises:
        OSError: the file cannot be written, or the disk is full.
        CheckpointError: the format does not support the dtype of a tensor.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # aligns all of them
    header = _header(ordered, metadata)
    digest, size = xxhash.xxh3_128(header), len(header)
    with path.open("wb") as file:
        file.write(header)
        for tensor in ordered.values():
            for chunk in _chunks(tensor.contiguous()):
                part = _bytes_of(chunk.cpu())
                digest.update(part)
                size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


class TensorEntry(NamedTuple):
    """One tensor of a file; ``begin`` is its position in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class TensorFile:
    """A safetensors file opened for reading; a context manager. Tensors of dtypes that are not written are left out.

    The safetensors library checks the header. It maps files into memory, where an error of the disk would kill the
    process, so tensors are read with ordinary system calls.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: strings by name.

    Raises:
        CheckpointError: the file cannot be opened, or is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt"):  # checks the header: no gaps, no overlaps, and the size of the file
                self._file = path.open("rb")
            length = int.from_bytes(self._file.read(8), "little")
            header = json.loads(self._file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._entries = {
                key: TensorEntry(_DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
                for key, entry in header.items()
                if entry["dtype"] in _DTYPES
            }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be opened: {error}; restore the file") from error

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._entries)

    def entry(self, key: str) -> TensorEntry:
        """The dtype and shape of a tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if key not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor {key!r}; restore the file")
        return self._entries[key]

    def read(self, key: str) -> Tensor:
        """Read a tensor to the CPU."""
        entry = self.entry(key)
        target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_into(key, target)
        return target

    def read_into(self, key: str, target: Tensor, start: int = 0) -> None:
        """Fill ``target`` with the elements of the flattened tensor, beginning at ``start``.

        Tensors on the CPU are filled directly, all others through a buffer of at most 64 MiB.

        Args:
            key: name of the tensor.
            target: contiguous tensor of the same dtype and any shape; its size is the number of elements to read.
            start: first element of the flattened tensor.

        Raises:
            CheckpointError: there is no such tensor, the dtype differs, it has too few elements, or reading fails.
        """
        entry, end = self.entry(key), start + target.numel()
        if target.dtype != entry.dtype:
            raise CheckpointError(f"{self.path}: {key} is {entry.dtype}, but {target.dtype} is required")
        if start < 0 or end > math.prod(entry.shape):
            raise CheckpointError(f"{self.path}: {key} has {math.prod(entry.shape)} elements, not {start} to {end}")
        try:
            self._file.seek(entry.begin + start * target.element_size())
            for chunk in _chunks(target):
                part = torch.empty_like(chunk, device="cpu") if chunk.device.type != "cpu" else chunk
                view = _bytes_of(part)
                if self._file.readinto(view) != len(view):
                    raise CheckpointError(f"{self.path}: ends within {key}; restore the file")
                chunk.copy_(part)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}; restore the file") from error


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON header, padded with spaces so that the data is aligned to 8 bytes."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name}: the dtype {tensor.dtype} cannot be saved")
        end = at + tensor.nbytes
        content[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Flat views of the consecutive parts of a contiguous tensor."""
    yield from tensor.detach().view(-1).split(max(CHUNK_BYTES // tensor.element_size(), 1))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
