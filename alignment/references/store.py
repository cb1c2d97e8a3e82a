"""Log-probs of a reference on disk: one folder for each key, in parts by row number, each whole or not there.

File logic only: nothing here knows of models, ranks or batches. A part is written to a hidden name, synced and
renamed, so a killed run loses at most the part that it was computing. Every part carries a checksum, and the manifest
spells out the whole key.
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

FORMAT_VERSION = 1  # raise it when parts are stored in another way, or the same key would give other numbers
PART_ROWS = 1024  # rows of a part, the most that a killed run has to compute again
_STALE_S = 24 * 3600.0  # hidden files older than this were left by a run that was killed

Logps = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


class LogpStore:
    """The log-probs of every row of one dataset under one reference.

    Args:
        parent: the folder that holds the stores' own folders.
        key: everything that the numbers depend on, as JSON can hold it; each value in a part of its own.
        partners: (R,) row ids of KTO's partners, -1 for a row without one; parts with others do not count.
        width: sequences of a row.

    Attributes:
        folder: of this store.
        values: (R, ``width``) fp32, what is known so far.
        missing: the parts that are not known, as ranges of row numbers.
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
        """All parts, as ranges of row numbers."""
        rows, step = len(self.partners), self._rows_per_part
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    @property
    def size(self) -> int:
        """Bytes of the parts that are there."""
        return sum(file.stat().st_size for file in self.folder.glob("part-*"))

    def read(self) -> list[str]:
        """Fill :attr:`values` with what is there and :attr:`missing` with what is not; nothing is written.

        Returns:
            A sentence for each file that cannot be used.
        """
        self.missing, self._unusable = self.parts, []
        if not self.folder.is_dir():
            return []
        manifest = self.folder / "manifest.json"
        if not _says(manifest, self._manifest):
            self._unusable = [self._file(part) for part in self.parts]
            return [f"{manifest}: does not hold the key of this store; every part is computed again"]
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
                faults.append(f"{file}: is torn ({error}); rows {part.start + 1} to {part.stop} are computed again")
        self.missing = missing
        return faults

    def prepare(self) -> None:
        """Make the folder ready for :meth:`write`: its manifest is there, and nothing that cannot be used.

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
            logps: (rows of the part, sequences of a row) fp32.

        Raises:
            OutputError: it cannot be written, a full disk included.
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
        """The log-probs of a part. Raises what reading does, or ValueError with what is wrong."""
        with safe_open(file, framework="numpy") as opened:
            logps, partners = opened.get_tensor("logps"), opened.get_tensor("partners")
            checksum = (opened.metadata() or {}).get("checksum")
        if logps.shape != (len(part), self.values.shape[1]) or logps.dtype != np.float32:
            raise ValueError("its table has another shape")
        if checksum != self._checksum(part, logps):
            raise ValueError("its checksum is wrong")
        if not np.array_equal(partners, self.partners[part.start : part.stop]):
            raise ValueError("its rows have other partners")
        found: Logps = logps
        return found

    def _checksum(self, part: range, logps: Logps) -> str:
        digest = hashlib.blake2b(f"{self._digest} {part.start} {part.stop}".encode(), digest_size=16)
        digest.update(logps.tobytes())
        return digest.hexdigest()


def _says(file: Path, text: str) -> bool:
    """Whether a file is there and holds ``text``."""
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def _publish(file: Path, content: bytes) -> None:
    """Write a file so that it is seen whole or not at all, and stays so when the machine stops."""
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
