"""The logs of a run: one JSON object per line, appended and flushed immediately, so that a crash loses nothing.

A full disk does not end a run: lines that cannot be written are kept in memory until space is available.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback, WandbCallback

from alignment.config.errors import OutputError, counted
from alignment.internals.transformers import tensorboard_writer
from alignment.run.durable import is_full, sync

Messages = Sequence[Mapping[str, Any]]
Row = Mapping[str, str | Messages | float | None]
TITLE = "completions"


def strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for inf and nan (the gradient norm of an fp16 overflow), which are not valid JSON."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class JsonlLog:
    """Appends records to ``path``; the file and its folder are created with the first record.

    Args:
        path: the file; None writes nothing (ranks other than rank 0).
        timed: add ``time``, the time of writing (UTC), to each record.

    Methods raise OutputError if the file cannot be written for another reason than a full disk.
    """

    def __init__(self, path: Path | None, *, timed: bool = False) -> None:
        self.path, self._timed = path, timed
        self._pending: list[str] = []
        self._full = False
        self._size: int | None = None  # bytes of complete lines; unknown before the first write

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, after any pending ones. On a full disk it becomes pending."""
        if self.path is not None:
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")  # always of the same length
            time = {"time": now.replace("+00:00", "Z")} if self._timed else {}
            self._pending.append(json.dumps(strict({**record, **time})))
            self.flush()

    def flush(self) -> bool:
        """Try to write the pending records; return whether none is left."""
        if self.path is None or not self._pending:
            return True
        try:
            self._append(self.path)
        except OSError as error:
            if not is_full(error):
                raise self._error(error) from error
            if not self._full:
                print(f"output_dir: no space left to write {self.path}; its lines are kept in memory", flush=True)
            self._full = True
            return False
        self._full, self._pending = False, []
        return True

    def finish(self) -> None:
        """Write the pending records at the end of a run, and sync the file; raise OutputError if the disk is full."""
        lost = counted(len(self._pending), "line")
        if not self.flush():
            raise OutputError(f"output_dir: no space left to write {self.path}: {lost} lost; free disk space")
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """``bytes``: size of the file, which is flushed to disk; ``pending``: lines waiting for space."""
        self.flush()
        size = 0
        if self.path is not None and self.path.exists():
            try:
                sync(self.path)
                size = self.path.stat().st_size if self._size is None else self._size
            except OSError as error:
                raise self._error(error) from error
        return {"bytes": size, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Truncate the file to the size in :meth:`state_dict`: the resumed run writes the rest again.

        If the file is missing or shorter than recorded, the run continues with a warning.
        """
        if self.path is None:
            return
        self._pending = list(state.get("pending", ()))
        try:
            size = _whole_lines(self.path, state["bytes"])
            if self.path.exists():
                os.truncate(self.path, size)
                self._size = size
        except OSError as error:
            raise self._error(error) from error
        if size < state["bytes"]:
            print(f"output_dir: {self.path}: some lines from before the checkpoint are lost", flush=True)

    def _append(self, path: Path) -> None:
        """Write all pending records, or none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self._size = _whole_lines(path) if self._size is None else self._size
        data = memoryview("".join(f"{line}\n" for line in self._pending).encode())
        try:
            with path.open("ab", buffering=0) as file:  # network file systems may report a full disk on closing
                # A second train() has moved the file away, or someone has emptied it.
                size = self._size = min(size, path.stat().st_size)
                os.truncate(path, size)  # a line torn by a crash, or what is left of a failed write
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
        except OSError:
            with contextlib.suppress(OSError):  # otherwise before the next write
                os.truncate(path, size)
            raise
        self._size = size + len(data)

    def _error(self, error: OSError) -> OutputError:
        return OutputError(f"output_dir: could not write {self.path}: {error}")


def _whole_lines(path: Path, most: int | None = None) -> int:
    """Bytes of the complete lines in a file, of its first ``most`` bytes."""
    return path.read_bytes()[:most].rfind(b"\n") + 1 if path.exists() else 0


class CompletionTable(JsonlLog):
    """A log of tables, also written to Weights & Biases and TensorBoard if ``callbacks`` has their integrations."""

    def __init__(self, path: Path | None, callbacks: Sequence[Any] = ()) -> None:
        super().__init__(path)
        self._callbacks = callbacks

    def write_table(self, step: int, rows: Sequence[Row]) -> None:
        """Write the table of one step, which becomes the first column; raise OutputError if that fails.

        ``rows`` are values by column, the same columns in each; messages are written as text, None for no value.
        """
        if self.path is None or not rows:
            return
        records = [{"step": step, **{name: as_text(value) for name, value in row.items()}} for row in rows]
        for record in records:
            self.write(record)
        for callback in self._callbacks:
            if isinstance(callback, WandbCallback):
                _to_wandb(step, records)
            if isinstance(callback, TensorBoardCallback) and (writer := tensorboard_writer(callback)) is not None:
                writer.add_text(TITLE, _literally(records), step)


def as_text(value: Any) -> Any:
    """Format messages as ``role: content`` lines, a single assistant message as its content; keep other values."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) == 1 and value[0]["role"] == "assistant" and isinstance(value[0].get("content"), str):
        return value[0]["content"]
    said = [(one["role"], (one.get("content"), *(one.get("tool_calls") or ()))) for one in value]
    return "\n".join(f"{role}: {' '.join(str(part) for part in parts if part is not None)}" for role, parts in said)


def _literally(records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown code block, in which texts are no markup."""
    rows = ["\n".join(f"{name}: {value}" for name, value in record.items() if value is not None) for record in records]
    return textwrap.indent("\n\n".join(rows), "    ")


def _to_wandb(step: int, records: Sequence[Mapping[str, Any]]) -> None:
    import wandb

    if wandb.run is not None:
        names: list[Any] = list(records[0])
        table = wandb.Table(columns=names, data=[[record[name] for name in names] for record in records])
        # Named as in transformers' callback: W&B's own step counter belongs to that.
        wandb.log({TITLE: table, "train/global_step": step})
