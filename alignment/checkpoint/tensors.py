"""safetensors files written in chunks with a checksum, and read by interval: no file is ever entirely in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.checkpoint.manifest import FileRecord
from alignment.config.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write tensors of any device to a safetensors file, in place, and flush it to disk.

    ``safetensors.torch.save_file`` copies every tensor into one buffer before it writes; this function copies at most
    64 MiB at a time, also from a device. Only non-contiguous tensors are copied entirely. Raises OSError, or
    CheckpointError if the format does not support the dtype of a tensor.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # aligns all of them
    header = _header(ordered, metadata)
    digest, size = xxhash.xxh3_128(header), len(header)
    with path.open("wb") as file:
        file.write(header)
        for tensor in ordered.values():
            for chunk in tensor.detach().contiguous().view(-1).split(max(CHUNK_BYTES // tensor.element_size(), 1)):
                part = memoryview(chunk.cpu().view(torch.uint8).numpy())
                digest.update(part)
                size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


class TensorFile:
    """A safetensors file opened for reading; the safetensors library checks its header and maps it into memory.

    Raises CheckpointError if it cannot be opened, or is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")  # no gaps, no overlaps, and the size of the file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be opened: {error}; restore the file") from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.keys = set(self._file.keys())

    def tensor(self, key: str) -> Tensor:
        """Return a tensor whose elements are read where they are used; raise CheckpointError if there is none."""
        if key not in self.keys:
            raise CheckpointError(f"{self.path}: has no tensor {key!r}; restore the file")
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def read_into(self, key: str, target: Tensor, start: int = 0) -> None:
        """Fill ``target``, of any shape and device, with elements of the flattened tensor, beginning at ``start``.

        Raises CheckpointError if there is no such tensor, the dtype differs, or it has too few elements.
        """
        source, end = self.tensor(key).view(-1), start + target.numel()
        if target.dtype != source.dtype:
            raise CheckpointError(f"{self.path}: {key} is {source.dtype}, but {target.dtype} is required")
        if start < 0 or end > source.numel():
            raise CheckpointError(f"{self.path}: {key} has {source.numel()} elements, not {start} to {end}")
        target.copy_(source[start:end].view(target.shape))


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
