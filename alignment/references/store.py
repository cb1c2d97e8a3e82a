"""Store log-probs of a reference on disk: a folder for each key, split into parts by row, each written atomically.

This module only handles files and is independent of models, ranks and batches. A part is written to a hidden file,
synced and renamed, so a killed run loses at most the part that it was computing. Every part has a checksum, and the
manifest contains the full key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from alignment.config.errors import OutputError

FORMAT_VERSION = 1  # increase it if the format of parts changes, or if the same key would give other values
PART_ROWS = 1024  # rows per part, the maximum that must be recomputed after a killed run
_STALE_S = 24 * 3600.0  # hidden files older than this were left by a run that was killed

Logps = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


class LogpStore:
    """The log-probs of every row of one dataset under one reference.

    Args:
        parent: the folder that contains the folders of all stores.
        key: everything that the log-probs depend on, as JSON values.
        partners: (R,) row IDs of KTO's partners, -1 for a row without one. Parts with other partners are not used.
        width: number of sequences per row.

    Attributes:
        folder: the folder of this store.
        values: (R, ``width``) fp32, the log-probs computed so far.
        missing: the parts that have not been computed, as ranges of rows.
    """

    def __init__(self, parent: Path, key: Mapping[str, Any], partners: Rows, width: int) -> None:
        self.partners, self._rows_per_part = partners, PART_ROWS
        self._manifest = json.dumps(
            {
                "format": FORMAT_VERSION,
                "rows": len(partners),
                "sequences_per_row": width,
                "rows_per_part": PART_ROWS,
                "key": dict(key),
            },
            indent=2,
            sort_keys=True,
        )
        self._digest = hashlib.blake2b(self._manifest.encode(), digest_size=16).hexdigest()
        self.folder = parent / f"reference-{self._digest}"
        self.values: Logps = np.zeros((len(partners), width), dtype=np.float32)
        self.missing = self.parts
        self._unusable: list[Path] = []

    @property
    def parts(self) -> list[range]:
        """All parts, as ranges of rows."""
        rows, step = len(self.partners), self._rows_per_part
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    @property
    def size(self) -> int:
        """The total size of the stored parts in bytes."""
        return sum(file.stat().st_size for file in self.folder.glob("part-*"))

    def read(self) -> list[str]:
        """Fill :attr:`values` from the stored parts, and :attr:`missing` with the missing ones. Nothing is written.

        Returns:
            A message for each file that cannot be used.
        """
        self.missing, self._unusable = self.parts, []
        if not self.folder.is_dir():
            return []
        manifest = self.folder / "manifest.json"
        if not _says(manifest, self._manifest):
            self._unusable = [self._file(part) for part in self.parts]
            return [f"{manifest}: does not contain the key of this store; all parts are recomputed"]
        faults, missing = [], []
        for part in self.parts:
            file = self._file(part)
            try:
                self.values[part.start : part.stop] = self._checked(file, part)
            except FileNotFoundError:
                missing.append(part)
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                missing.append(part)
                self._unusable.append(file)
                faults.append(
                    f"{file} is truncated or corrupt ({error}); rows {part.start + 1} to {part.stop} are recomputed"
                )
        self.missing = missing
        return faults

    def prepare(self) -> None:
        """Prepare the folder for :meth:`write`: write the manifest and delete unusable files.

        Raises:
            OutputError: the folder cannot be written.
        """
        with _errors_named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self._unusable:
                file.unlink(missing_ok=True)
            for file in self.folder.glob(".*"):
                if time.time() - file.stat().st_mtime > _STALE_S:
                    file.unlink(missing_ok=True)
            if not _says(self.folder / "manifest.json", self._manifest):
                _publish(self.folder / "manifest.json", self._manifest.encode())

    def write(self, part: range, logps: Logps) -> None:
        """Add a part.

        Args:
            part: one of :attr:`missing`.
            logps: (rows of the part, sequences per row) fp32.

        Raises:
            OutputError: the part cannot be written, for example because the disk is full.
        """
        partners = self.partners[part.start : part.stop]
        metadata = {"checksum": self._checksum(part, logps)}
        with _errors_named(self.folder):
            _publish(self._file(part), save({"logps": logps, "partners": partners}, metadata))
        self.values[part.start : part.stop] = logps
        self.missing = [other for other in self.missing if other != part]

    def _file(self, part: range) -> Path:
        return self.folder / f"part-{part.start:09d}-{part.stop:09d}.safetensors"

    def _checked(self, file: Path, part: range) -> Logps:
        """Read and check the log-probs of a part. Raises the errors of reading, or ValueError if a check fails."""
        with safe_open(file, framework="numpy") as opened:
            logps, partners = opened.get_tensor("logps"), opened.get_tensor("partners")
            checksum = (opened.metadata() or {}).get("checksum")
        if logps.shape != (len(part), self.values.shape[1]) or logps.dtype != np.float32:
            raise ValueError("unexpected shape or dtype")
        if checksum != self._checksum(part, logps):
            raise ValueError("checksum mismatch")
        if not np.array_equal(partners, self.partners[part.start : part.stop]):
            raise ValueError("different partners")
        found: Logps = logps
        return found

    def _checksum(self, part: range, logps: Logps) -> str:
        digest = hashlib.blake2b(f"{self._digest} {part.start} {part.stop}".encode(), digest_size=16)
        digest.update(logps.tobytes())
        return digest.hexdigest()


def _says(file: Path, text: str) -> bool:
    """Return whether a file exists and contains ``text``."""
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def _publish(file: Path, content: bytes) -> None:
    """Write a file atomically and durably."""
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        with partial.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _errors_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{folder}: the reference's log-probs could not be written: {error.strerror or error}; set "
            "HF_DATASETS_CACHE to another folder"
        ) from error
