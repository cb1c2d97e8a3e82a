"""Reading ``log.jsonl``, also while a run is writing it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

_RECENT = 50  # entries used for rates
_BOOKKEEPING = ("step", "epoch", "num_tokens", "num_input_tokens_seen", "tokens_per_second", "time")

Record = dict[str, Any]


class Rates(NamedTuple):
    """Steps and tokens per second; None if unknown."""

    steps: float | None
    tokens: float | None


def is_mean(name: str) -> bool:
    """Whether a metric is a mean for readers, and not a count or a sum from which others compute means."""
    return not (name.endswith("_sum") or name.startswith("count/"))


class Log:
    """The complete lines of a log, which may be missing: ``records`` are its JSON objects, in order.

    ``unreadable`` is the number of other lines. Raises OSError if the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last line may be incomplete
        known = [parsed(line) for line in lines if line.strip()]
        self.records = [record for record in known if record]
        self.unreadable = len(known) - len(self.records)

    @functools.cached_property
    def events(self) -> list[Record]:
        """The lines about the run itself: ``start``, ``resume``, ``end`` and others with ``event``."""
        return [record for record in self.records if "event" in record]

    @functools.cached_property
    def last(self) -> Record:
        """The newest training entry."""
        return next((record for record in reversed(self.records) if _is_training(record)), {})

    @functools.cached_property
    def evaluation(self) -> Record:
        """The newest evaluation, all evaluation sets combined (each set has its own line)."""
        found = [record for record in self.records if not {"event", "num_tokens", "train_runtime"} & record.keys()]
        newest = [record for record in found if record.get("step") == found[-1].get("step")]
        return {name: value for record in newest for name, value in record.items()}

    @property
    def totals(self) -> Record:
        """The entry with the totals of the run, such as ``train_runtime``; empty before its end."""
        return next((record for record in reversed(self.records) if "train_runtime" in record), {})

    @property
    def ended(self) -> Record | None:
        """The ``end`` event, if the newest attempt finished."""
        newest = self.newest("start", "resume", "end")  # an upload may follow it
        return newest if newest.get("event") == "end" else None

    def newest(self, *events: str) -> Record:
        """The newest event with one of these names; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] in events), {})

    def rates(self) -> Rates:
        """Rates over the newest entries of the newest attempt or, after the end, over the whole run."""
        if self.ended is not None and self.totals:
            seconds, tokens = number(self.totals.get("train_runtime")), number(self.last.get("num_tokens"))
            steps = number(self.totals.get("train_steps_per_second"))
            return Rates(steps, tokens / seconds if tokens and seconds else None)
        begun = self.newest("start", "resume")
        since = next((place for place, record in enumerate(self.records) if record is begun), 0)
        entries = [record for record in self.records[since:] if _is_training(record)][-_RECENT:]
        if len(entries) == 1:  # the count of tokens at the step of a resume is unknown
            entries.insert(0, {"step": 0, **({"num_tokens": 0} if begun.get("event") == "start" else {}), **begun})
        if len(entries) < 2:
            return Rates(None, None)
        return Rates(*(_rate(entries[0], entries[-1], key) for key in ("step", "num_tokens")))


def _is_training(record: Record) -> bool:
    return "num_tokens" in record and "train_runtime" not in record


def _rate(first: Record, last: Record, key: str) -> float | None:
    begin, end = seconds_of(first.get("time")), seconds_of(last.get("time"))
    before, after = number(first.get(key)), number(last.get(key))
    if begin is None or end is None or before is None or after is None:
        return None
    return (after - before) / (end - begin) if end > begin and after > before else None


def metrics_of(record: Record) -> Record:
    """The metrics of an entry, without step, epoch, time and token counts."""
    return {name: value for name, value in record.items() if name not in _BOOKKEEPING}


def number(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else None."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """``value`` if it is a plausible count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53 else None


def seconds_of(time: Any) -> float | None:
    """Parse a time of the log or of ``status.json`` into seconds since 1970; None for anything else."""
    with contextlib.suppress(ValueError, OverflowError, AttributeError):
        return datetime.fromisoformat(time.removesuffix("Z") + "+00:00").timestamp()
    return None


def parsed(line: bytes) -> Record:
    """A line of JSON as an object; empty if it is not one."""
    found = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
    return found if isinstance(found, dict) else {}
