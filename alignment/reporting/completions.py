"""Tables of completions, written to a JSONL file and to the reporting integrations."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback, WandbCallback

from alignment.internals.transformers import tensorboard_writer
from alignment.reporting.log import JsonlLog

Messages = Sequence[Mapping[str, Any]]
Row = Mapping[str, str | Messages | float | None]
TITLE = "completions"


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
