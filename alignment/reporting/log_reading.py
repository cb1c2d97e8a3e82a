"""Reading ``log.jsonl``, also while a run is writing it."""

from __future__ import annotations

import json
import math
from collections import deque
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

_RECENT = 50  # entries used for rates
_CHUNK = 1 << 20
_ANCHOR = 64  # bytes before the read position, which identify the file
_BOOKKEEPING = ("step", "epoch", "num_tokens", "num_input_tokens_seen", "tokens_per_second", "time")

Record = dict[str, Any]


class Rates(NamedTuple):
    """Steps and tokens per second; None if unknown."""

    steps: float | None
    tokens: float | None


def is_mean(name: str) -> bool:
    """Whether a metric is a mean for readers, and not a count or a sum from which others compute means."""
    return not (name.endswith("_sum") or name.startswith("count/"))


class LogReader:
    """Reads a log incrementally: each call reads the lines added since the previous one.

    A log is truncated when its run is resumed; it is then read from the start. Its last line may be incomplete.

    Args:
        path: the file; it may be missing.
        history: keep all lines, parsed, in ``records``.

    Attributes:
        events: the lines about the run itself: ``start``, ``resume``, ``end`` and others with ``event``.
        records: all lines in order, events included, if they are kept.
        unreadable: number of complete lines that are not JSON objects.
        size: bytes read so far.
    """

    def __init__(self, path: Path, *, history: bool = False) -> None:
        self.path, self._history = path, history
        self._forget()

    def _forget(self) -> None:
        self.events: list[Record] = []
        self.records: list[Record] = []
        self.unreadable = self.size = 0
        self._anchor, self._rest = b"", b""
        self._recent: deque[bytes] = deque(maxlen=_RECENT)  # of the newest attempt
        self._evaluations: deque[bytes] = deque(maxlen=_RECENT)  # since the last training entry
        self._trained_since = False  # the newest evaluation
        self._last = self._totals = b""

    def read(self) -> None:
        """Read the new lines.

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._forget()
            return
        with file:
            if not self._continues(file):
                self._forget()
                file.seek(0)
            while chunk := file.read(_CHUNK):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                self.size += len(chunk)
                self._anchor = (self._anchor + chunk)[-_ANCHOR:]
                for line in lines:
                    self._take(line.strip())

    def _continues(self, file: BufferedReader) -> bool:
        """Whether the file is unchanged up to the read position; the file is then positioned there."""
        file.seek(self.size - len(self._anchor))
        return file.read(len(self._anchor)) == self._anchor

    def _take(self, line: bytes) -> None:
        """Keep a complete line if it may be needed. Most are never parsed, since a log may be long."""
        if not line:
            return
        if not (line.startswith(b"{") and line.endswith(b"}")):
            self.unreadable += 1
            return
        if self._history and (record := _parsed(line)):
            self.records.append(record)
        if b'"event":' in line:
            self._take_event(_parsed(line))
        elif b'"train_runtime":' in line:
            self._totals = line
        elif b'"num_tokens":' in line:
            self._recent.append(line)
            self._trained_since = True
        else:
            if self._trained_since:
                self._evaluations.clear()
            self._evaluations.append(line)
            self._trained_since = False

    def _take_event(self, event: Record) -> None:
        if event.get("event") in ("start", "resume"):
            self._last = self._recent[-1] if self._recent else self._last
            self._recent.clear()
        self.events.append(event)

    @property
    def last(self) -> Record:
        """The newest training entry."""
        return next((record for line in (*reversed(self._recent), self._last) if (record := _parsed(line))), {})

    @property
    def evaluation(self) -> Record:
        """The newest evaluation, all evaluation sets combined (each set has its own line)."""
        return {name: value for line in self._evaluations for name, value in _parsed(line).items()}

    @property
    def totals(self) -> Record:
        """The entry with the totals of the run, such as ``train_runtime``; empty before its end."""
        return _parsed(self._totals)

    @property
    def ended(self) -> Record | None:
        """The ``end`` event, if the newest attempt finished."""
        newest = self.newest("start", "resume", "end")  # an upload may follow it
        return newest if newest.get("event") == "end" else None

    def newest(self, *events: str) -> Record:
        """The newest event with one of these names; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") in events), {})

    def rates(self) -> Rates:
        """Rates over the newest entries of the newest attempt or, after the end, over the whole run."""
        if self.ended is not None and (totals := self.totals):
            seconds, tokens = number(totals.get("train_runtime")), number(self.last.get("num_tokens"))
            steps = number(totals.get("train_steps_per_second"))
            return Rates(steps, tokens / seconds if tokens and seconds else None)
        entries = [_parsed(line) for line in self._recent]
        if len(entries) == 1:
            entries.insert(0, {"step": 0, "num_tokens": 0} | self.newest("start", "resume"))
            if entries[0].get("event") == "resume":
                entries[0]["num_tokens"] = None  # the count at that step is not in the event
        if len(entries) < 2:
            return Rates(None, None)
        return Rates(*(_rate(entries[0], entries[-1], key) for key in ("step", "num_tokens")))


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
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if known and math.isfinite(value) else None
    except OverflowError:
        return None


def seconds_of(time: Any) -> float | None:
    """Parse a time of the log or of ``status.json`` into seconds since 1970; None for anything else."""
    if not isinstance(time, str) or not time.endswith("Z"):
        return None
    try:
        return datetime.fromisoformat(f"{time[:-1]}+00:00").timestamp()
    except (ValueError, OverflowError):
        return None


def _parsed(line: bytes) -> Record:
    try:
        found = json.loads(line) if line else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
