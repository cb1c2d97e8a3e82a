"""Phases: the unit of measuring and of memory. Each has a name, a time, a number of tokens and a peak of memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import psutil
import torch

from alignment.reporting.activity import ACTIVITY

_EVERY_S = 0.01  # between two samples of the resident set
# Phases that had another name in the states of older runs.
_NAMES = {"learn": "train"}


@dataclass
class PhaseRecord:
    """Totals of a phase on this rank.

    Attributes:
        seconds: wall time.
        tokens: real tokens that it went through.
        peak_bytes: most memory at any time: what the device's allocator held, or on a CPU the resident set.
        entries: how often it was entered.
    """

    seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int = 0
    entries: int = 0


class _Stretch(NamedTuple):
    """A stretch of a GPU's work of which the end may still be to come."""

    record: PhaseRecord
    begin: torch.cuda.Event
    end: torch.cuda.Event


class Phases:
    """Times named stretches of work, one at a time.

    A GPU works behind the host, which does not wait for the end of a phase: two events measure it, and their times are
    read once the GPU has come past them.
    """

    def __init__(self, device: torch.device) -> None:
        self._records: dict[str, PhaseRecord] = {}
        self._running: list[_Stretch] = []
        self._cuda = device if device.type == "cuda" else None
        self._prefix = ""

    @property
    def records(self) -> dict[str, PhaseRecord]:
        """The totals by name; waits for a GPU to end what has begun."""
        if self._running:
            self._running[-1].end.synchronize()
            self._read()
        return self._records

    @contextlib.contextmanager
    def of_evaluation(self) -> Iterator[None]:
        """Within this context phases are recorded apart from those of training, as ``eval rollout`` …"""
        before, self._prefix = self._prefix, "eval "
        try:
            yield
        finally:
            self._prefix = before

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[PhaseRecord]:
        """Measure the body as part of phase ``name``, whether it returns or raises; it adds its tokens itself."""
        name = name if name == "evaluate" else self._prefix + name
        record = self._records.setdefault(name, PhaseRecord())
        self._reset_peak()
        start = time.monotonic() if self._cuda is None else _now()
        try:
            with ACTIVITY(name):
                yield record
        finally:
            record.peak_bytes = max(record.peak_bytes, self._peak())
            if isinstance(start, float):
                record.seconds += time.monotonic() - start
            else:
                self._running.append(_Stretch(record, start, _now()))
                self._read()
            record.entries += 1

    def _read(self) -> None:
        """Add the times of what the GPU has done."""
        while self._running and self._running[0].end.query():
            record, begin, end = self._running.pop(0)
            record.seconds += begin.elapsed_time(end) / 1e3

    def _reset_peak(self) -> None:
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            _SAMPLER.start()

    def _peak(self) -> int:
        if self._cuda is None:
            return _SAMPLER.stop()
        return int(torch.cuda.max_memory_allocated(self._cuda))

    def summary(self) -> dict[str, dict[str, float]]:
        """The totals as plain numbers, for the log."""
        return {name: asdict(record) for name, record in self.records.items()}

    def state_dict(self) -> dict[str, Any]:
        """The totals."""
        return {"records": self.summary()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._running.clear()
        self._records = {_NAMES.get(name, name): PhaseRecord(**record) for name, record in state["records"].items()}

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """For another number of ranks: the first one takes over every rank's tokens."""
        records = over_ranks([state["records"] for state in states])
        if rank:
            records = {name: {**record, "tokens": 0} for name, record in records.items()}
        return {"records": records}


def _now() -> torch.cuda.Event:
    """A mark behind what the GPU has been given so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def over_ranks(summaries: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """One summary of several ranks' ones: tokens added up, of everything else the largest."""
    names = {name: None for summary in summaries for name in summary}
    found = {name: [summary[name] for summary in summaries if name in summary] for name in names}
    return {
        name: {key: (sum if key == "tokens" else max)(part[key] for part in parts) for key in parts[0]}
        for name, parts in found.items()
    }


class ResidentSampler:
    """The largest resident set of this process during a stretch of work.

    Linux keeps such a mark for the whole life of a process, and resetting it would falsify what others measure. So it
    is sampled, every 10 ms between :meth:`start` and :meth:`stop`, by a thread that otherwise sleeps; a shorter peak
    may be missed.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._active = threading.Event()
        self._peak = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a stretch."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="resident-set", daemon=True)
            self._thread.start()
        self._peak = self._resident()
        self._active.set()

    def stop(self) -> int:
        """End it; return its peak in bytes."""
        self._active.clear()
        return max(self._peak, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while True:
            self._active.wait()
            self._peak = max(self._peak, self._resident())
            time.sleep(_EVERY_S)


_SAMPLER = ResidentSampler()
