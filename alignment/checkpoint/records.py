"""Size and checksum of a file; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash

from alignment.config.errors import CheckpointError


class FileRecord(NamedTuple):
    """The manifest's record of a file.

    Attributes:
        size: size in bytes.
        checksum: xxh3_128 of the content, 32 hexadecimal digits.
    """

    size: int
    checksum: str


def record_of(path: Path) -> FileRecord:
    """Compute size and checksum of a file, which is read in chunks.

    Raises:
        CheckpointError: the file cannot be read.
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
