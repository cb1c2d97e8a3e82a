"""The run's log: one JSON object per line, appended and flushed at once, so that a crash loses nothing.

A full disk does not end a run: lines that find no space wait in memory, and are written once there is some.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError
from alignment.reporting.durable import is_full, sync

_BLOCK = 1 << 16


def strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for inf and nan (the gradient norm of an fp16 overflow), which JSON does not know."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _now() -> str:
    """The time of day as ``2026-11-22T18:20:11.042Z``, always of the same length."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _print(text: str) -> None:
    print(text, flush=True)


class JsonlLog:
    """Appends records to ``path``; the file and its folder are made at the first record.

    Args:
        path: the file, or None to write nothing (ranks other than the first).
        tell: prints a line for the user.
        timed: each record ends with ``time``, when it was written (UTC).
    """

    def __init__(self, path: Path | None, tell: Callable[[str], None] = _print, *, timed: bool = False) -> None:
        self.path, self._tell, self._timed = path, tell, timed
        self._pending: list[str] = []
        self._full = False
        self._failed_at: int | None = None  # where a failed write began, until that is cut off

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, after those that wait. On a full disk it waits with them.

        Raises:
            OutputError: the file cannot be written for another reason.
        """
        if self.path is not None:
            time = {"time": _now()} if self._timed else {}
            self._pending.append(json.dumps(strict({**record, **time})))
            self.flush()

    def flush(self) -> bool:
        """Try to write what waits; whether nothing does any more.

        Raises:
            OutputError: the file cannot be written for another reason than a full disk.
        """
        if self.path is None or not self._pending:
            return True
        try:
            self._append(self.path)
        except OSError as error:
            if not is_full(error):
                raise self._error(error) from error
            if not self._full:
                self._tell(
                    f"output_dir: no space left to write {self.path}: its lines are kept in memory and written when "
                    "there is space again"
                )
            self._full = True
            return False
        if self._full:
            self._tell(f"output_dir: {self.path} is written again: {len(self._pending)} kept line(s) were added")
        self._full, self._pending = False, []
        return True

    def finish(self) -> None:
        """Write what still waits, at the end of a run, and return when the file is on the disk.

        Raises:
            OutputError: there is no space for it, or the file cannot be written.
        """
        if not self.flush():
            raise OutputError(
                f"output_dir: no space left to write {self.path}: its last {len(self._pending)} line(s) are lost; "
                "free some space"
            )
        self._sync()

    def state_dict(self) -> dict[str, Any]:
        """``bytes``: how much of the file there is, on the disk; ``pending``: the lines that wait for space.

        Raises:
            OutputError: the file cannot be written, or not be synced.
        """
        self.flush()
        self._sync()
        size = self.path.stat().st_size if self.path is not None and self.path.exists() else 0
        return {"bytes": size if self._failed_at is None else self._failed_at, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the file back to what :meth:`state_dict` saw: a run that goes on from there writes the rest again.

        A file that is missing, or shorter than it was, is gone on with, and the user told: the run is worth more.

        Raises:
            OutputError: the file cannot be read or cut.
        """
        if self.path is None:
            return
        self._pending, self._failed_at = list(state.get("pending", ())), None
        try:
            self._cut_back(self.path, state["bytes"])
        except OSError as error:
            raise self._error(error) from error

    def _cut_back(self, path: Path, size: int) -> None:
        if not path.exists():
            if size:
                self._tell(f"output_dir: {path} is missing; what it said before the checkpoint is lost")
            return
        if path.stat().st_size > size:
            os.truncate(path, size)
        left = _cut_torn_line(path)
        if left < size:
            self._tell(
                f"output_dir: {path} has {left} bytes of whole lines where the checkpoint saw {size}; some lines "
                "before the checkpoint are lost"
            )

    def _append(self, path: Path) -> None:
        """Write all that waits at once, or nothing of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._failed_at is not None:
            self._cut_failed_write(path)
        data = memoryview("".join(f"{line}\n" for line in self._pending).encode())
        start = _cut_torn_line(path) if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:  # network file systems may report a full disk on closing
                self._failed_at = start
                while data:
                    data = data[file.write(data) :]
        except OSError:
            if self._failed_at is not None:
                self._cut_failed_write(path)
            raise
        self._failed_at = None

    def _cut_failed_write(self, path: Path) -> None:
        assert self._failed_at is not None
        if path.exists() and path.stat().st_size > self._failed_at:
            os.truncate(path, self._failed_at)
        self._failed_at = None

    def _sync(self) -> None:
        if self.path is not None and self.path.exists():
            try:
                sync(self.path)
            except OSError as error:
                raise self._error(error) from error

    def _error(self, error: OSError) -> OutputError:
        return OutputError(f"output_dir: could not write {self.path}: {error}")


def _cut_torn_line(path: Path) -> int:
    """Remove what follows the last line break of a file, which a crash has left; return the size."""
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 1) if end == size else max(0, end - _BLOCK)  # most files end with a whole line
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
    if end < size:
        os.truncate(path, end)
    return end
