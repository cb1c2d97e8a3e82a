"""Size and checksum of a file; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash

from alignment.config.errors import CheckpointError


class FileRecord(NamedTuple):
    """What a manifest says of a file.

    Attributes:
        size: in bytes.
        checksum: xxh3_128 of its content, 32 hexadecimal digits.
    """

    size: int
    checksum: str


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file, read in chunks.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(4 * 2**20))
    size = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; restore the file") from error
    return FileRecord(size, digest.hexdigest())
