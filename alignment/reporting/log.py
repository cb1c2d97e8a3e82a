"""The run's log: one JSON object per line, appended and flushed at once, so that a crash loses nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError


def strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for inf and nan (the gradient norm of an fp16 overflow), which JSON does not know."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class JsonlLog:
    """Appends records to ``path``; the file and its folder are made at the first record.

    Args:
        path: the file, or None to write nothing (ranks other than the first).
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one record.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(strict(record)) + "\n")
        except OSError as error:
            raise OutputError(f"output_dir: could not write {self.path}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """How much of the file there is."""
        return {"bytes": self.path.stat().st_size if self.path is not None and self.path.exists() else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove what was written after :meth:`state_dict`: a run that goes on from there writes it again."""
        if self.path is not None and self.path.exists() and self.path.stat().st_size > state["bytes"]:
            os.truncate(self.path, state["bytes"])
