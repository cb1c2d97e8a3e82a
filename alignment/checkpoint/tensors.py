"""Writing and reading safetensors files in chunks and with a checksum, so that no file is ever entirely in memory."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from alignment.checkpoint.records import FileRecord
from alignment.config.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
_LONGEST_HEADER = 100_000_000  # bytes; the maximum of the safetensors library
_METADATA = "__metadata__"
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


class _Entry(NamedTuple):
    """One tensor of a file; ``begin`` and ``end`` are positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


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
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # aligns all of them
    header = _header(ordered, metadata)
    digest = xxhash.xxh3_128()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in itertools.chain([memoryview(header)], *(_chunks(tensor) for _, tensor in ordered)):
            digest.update(part)
            _write_all(descriptor, part)
            size += len(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(size, digest.hexdigest())


def file_bytes(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> int:
    """The size of the file that :func:`write_tensors` would write, up to the lengths of the names."""
    tensors = list(tensors)
    return len(_header([(f"{number:024}", tensor) for number, tensor in enumerate(tensors)], metadata)) + sum(
        tensor.numel() * tensor.element_size() for tensor in tensors
    )


class TensorFile:
    """A safetensors file opened for reading, with a checked header.

    Use it as a context manager, or call :meth:`close`.

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
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}; restore the file") from error
        try:
            self.metadata, self._entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Repeated calls have no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def keys(self) -> list[str]:
        """The names of the tensors, in the order of the file."""
        return list(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._entry(key).dtype

    def read(self, key: str) -> Tensor:
        """Read a tensor to the CPU."""
        entry = self._entry(key)
        target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_into(key, target)
        return target

    @torch.no_grad()
    def read_into(self, key: str, target: Tensor, start: int = 0) -> None:
        """Fill ``target`` with the elements of the flattened tensor, beginning at ``start``.

        Contiguous CPU tensors are filled directly, all others through a buffer of at most 64 MiB.

        Args:
            key: name of the tensor.
            target: tensor of the same dtype and any shape; its size is the number of elements to read.
            start: first element of the flattened tensor.

        Raises:
            CheckpointError: there is no such tensor, the dtype differs, it has too few elements, or reading fails.
        """
        entry = self._entry(key)
        if target.dtype != entry.dtype:
            raise CheckpointError(f"{self.path}: {key} is {entry.dtype}, but {target.dtype} is required")
        count, held = target.numel(), math.prod(entry.shape)
        if start < 0 or start + count > held:
            raise CheckpointError(
                f"{self.path}: {key} has {held} elements, but elements {start} to {start + count} are required"
            )
        offset = entry.begin + start * target.element_size()
        target = target.detach()
        if target.device.type == "cpu" and target.is_contiguous():
            self._read_bytes(_bytes_of(target), offset)
            return
        whole = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        flat = whole.view(-1)
        step = max(CHUNK_BYTES // target.element_size(), 1)
        buffer = torch.empty(min(step, count), dtype=target.dtype, device="cpu")
        for first in range(0, count, step):
            part = buffer[: min(step, count - first)]
            self._read_bytes(_bytes_of(part), offset + first * target.element_size())
            flat[first : first + part.numel()].copy_(part)
        if whole is not target:
            target.copy_(whole)

    def _entry(self, key: str) -> _Entry:
        if key not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor {key!r}")
        return self._entries[key]

    def _read_bytes(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from position ``offset``; one system call reads at most 2 GiB."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}; restore the file") from error
            if not count:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}; restore the file")
            done += count

    def _read_header(self) -> tuple[dict[str, str], dict[str, _Entry]]:
        size = os.fstat(self._descriptor).st_size
        if size < 8:
            raise self._damaged(f"{size} bytes are too few for a header")
        first = bytearray(8)
        self._read_bytes(memoryview(first), 0)
        length = int.from_bytes(first, "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise self._damaged(f"the header of {length} bytes does not fit into the {size} bytes of the file")
        text = bytearray(length)
        self._read_bytes(memoryview(text), 8)
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"the header is not valid JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._damaged("the header is not a JSON object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._damaged("the metadata does not map names to strings")
        return metadata, self._checked(header, 8 + length, size)

    def _checked(self, header: dict[str, Any], begin: int, size: int) -> dict[str, _Entry]:
        """The entries in the order of the file, which they must fill without gaps."""
        entries = {key: self._checked_entry(key, value, begin) for key, value in header.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
        at = begin
        for key, entry in entries.items():
            if entry.begin != at:
                raise self._damaged(f"{key} starts at byte {entry.begin} instead of {at}")
            at = entry.end
        if at != size:
            raise self._damaged(f"{size} bytes instead of {at}")
        return entries

    def _checked_entry(self, key: str, value: Any, begin: int) -> _Entry:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"the entry of {key} does not consist of dtype, shape and data_offsets")
        shape, offsets = value["shape"], value["data_offsets"]
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._damaged(f"shape and data_offsets of {key} must be non-negative integers")
        if not isinstance(value["dtype"], str) or value["dtype"] not in _DTYPES:
            raise self._damaged(f"the dtype {value['dtype']!r} of {key} is not supported")
        dtype = _DTYPES[value["dtype"]]
        if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise self._damaged(f"data_offsets of {key} do not match its shape {shape}")
        return _Entry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; the file is damaged or not a safetensors file; restore it")


def _header(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON header, padded with spaces so that the data is aligned to 8 bytes."""
    content: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name}: the dtype {tensor.dtype} cannot be saved")
        end = at + tensor.numel() * tensor.element_size()
        content[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in chunks."""
    flat = tensor.detach().contiguous().view(-1)
    step = max(CHUNK_BYTES // tensor.element_size(), 1)
    for first in range(0, flat.numel(), step):
        yield _bytes_of(flat[first : first + step].cpu())


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate name")
    return found
