"""A disk that can be filled: a tmpfs of a few kilobytes, where this process may mount one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int = 64) -> Iterator[Path]:
    """``folder`` as the root of a disk of that size; skips the test where that cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte of a disk free; the file that takes the space."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"0" * size)
    return ballast


def full(path: object) -> OSError:
    """The error of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
