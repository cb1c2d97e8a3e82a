"""Reading ``log.jsonl``, also while a run is writing it."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

_RECENT = 50  # entries used for rates
_BOOKKEEPING = ("step", "epoch", "num_tokens", "num_input_tokens_seen", "tokens_per_second", "time")

Record = dict[str, Any]


class Log:
    """The complete lines of a log, which may be missing. Raises OSError if the file exists and cannot be read.

    Attributes:
        records: the JSON objects in it, in order.
        unreadable: the number of other lines.
        events: the lines about the run itself: ``start``, ``resume``, ``end`` and others with ``event``.
        last: the newest training entry; empty if there is none, like the following.
        totals: the entry with the totals of the run, such as ``train_runtime``.
        evaluation: the newest evaluation, all evaluation sets combined (each set has its own line).
    """

    def __init__(self, path: Path) -> None:
        found = read_lines(path)
        self.records = [record for record in found if record]
        self.unreadable = len(found) - len(self.records)
        self.events = [record for record in self.records if "event" in record]
        self._training = [one for one in self.records if "num_tokens" in one and "train_runtime" not in one]
        self.last = self._training[-1] if self._training else {}
        self.totals = next((record for record in reversed(self.records) if "train_runtime" in record), {})
        evaluated = [one for one in self.records if not {"event", "num_tokens", "train_runtime"} & one.keys()]
        newest = [record for record in evaluated if record.get("step") == evaluated[-1].get("step")]
        self.evaluation = {name: value for record in newest for name, value in record.items()}

    @property
    def ended(self) -> Record | None:
        """The ``end`` event, if the newest attempt finished."""
        newest = self.newest("start", "resume", "end")  # an upload may follow it
        return newest if newest.get("event") == "end" else None

    def newest(self, *events: str) -> Record:
        """The newest event with one of these names; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] in events), {})

    def rates(self) -> tuple[float | None, float | None]:
        """Steps and tokens per second over the newest entries of the newest attempt, or over a run that has ended."""
        if self.ended and self.totals:
            seconds, steps = self.totals["train_runtime"], self.totals.get("train_steps_per_second")
            return steps, self.last.get("num_tokens", 0) / seconds or None
        since = self.newest("start", "resume").get("time", "")
        recent = [entry for entry in self._training if entry["time"] >= since][-_RECENT:]
        seconds = seconds_of(recent[-1]["time"]) - seconds_of(recent[0]["time"]) if recent else 0.0
        if seconds <= 0:
            return None, None
        steps, tokens = ((recent[-1][key] - recent[0][key]) / seconds for key in ("step", "num_tokens"))
        return steps or None, tokens or None


def is_mean(name: str) -> bool:
    """Whether a metric is a mean for readers, and not a count or a sum from which others compute means."""
    return not (name.endswith("_sum") or name.startswith("count/"))


def metrics_of(record: Record) -> Record:
    """The metrics of an entry, without step, epoch, time and token counts."""
    return {name: value for name, value in record.items() if name not in _BOOKKEEPING}


def number(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else None."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known and math.isfinite(value) else None


def seconds_of(time: str) -> float:
    """Parse a time of the log or of ``status.json`` into seconds since 1970."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def read_lines(path: Path) -> list[Record]:
    """The JSON object in each complete line of a file, which may be missing; empty for a line that is not one."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last line may be incomplete
    return [parsed(line) for line in lines if line.strip()]


def parsed(text: bytes) -> Record:
    """A JSON object; empty if the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
