"""Phases: the unit of time and memory measurements. Each has a name, a time, a number of tokens and a memory peak."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from alignment.reporting.progress import peak_resident_bytes
from alignment.run.activity import ACTIVITY


@dataclass
class PhaseRecord:
    """Totals of a phase on this rank: wall time, non-padding tokens, and how often it was entered.

    ``peak_bytes`` is the peak memory of the device's allocator; on a CPU, that of the process since its start.
    """

    seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int = 0
    entries: int = 0


class Phases:
    """Measures named intervals of work, one at a time.

    A GPU works asynchronously, and the host does not wait for the end of a phase: two events measure it, and their
    times are read once the GPU has reached them.
    """

    def __init__(self, device: torch.device) -> None:
        self._records: dict[str, PhaseRecord] = {}
        # Intervals of GPU work that may not have finished yet, with an event at the start and one at the end.
        self._running: list[tuple[PhaseRecord, torch.cuda.Event, torch.cuda.Event]] = []
        self._cuda = device if device.type == "cuda" else None
        self._prefix = ""

    @property
    def records(self) -> dict[str, PhaseRecord]:
        """The totals by name; waits until the GPU has finished what was measured."""
        if self._running:
            self._running[-1][2].synchronize()
            self._read()
        return self._records

    @contextlib.contextmanager
    def of_evaluation(self) -> Iterator[None]:
        """Within this context, phases are recorded separately from those of training, as ``eval rollout`` …"""
        before, self._prefix = self._prefix, "eval "
        try:
            yield
        finally:
            self._prefix = before

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[PhaseRecord]:
        """Measure the body as part of phase ``name``, whether it returns or raises; the body adds its tokens."""
        name = name if name == "evaluate" else self._prefix + name
        record = self._records.setdefault(name, PhaseRecord())
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        start = time.monotonic() if self._cuda is None else _now()
        try:
            with ACTIVITY(name):
                yield record
        finally:
            if isinstance(start, float):
                peak = peak_resident_bytes()
                record.seconds += time.monotonic() - start
            else:
                peak = int(torch.cuda.max_memory_allocated(self._cuda))
                self._running.append((record, start, _now()))
                self._read()
            record.peak_bytes = max(record.peak_bytes, peak)
            record.entries += 1

    def _read(self) -> None:
        """Add the times of the intervals that the GPU has finished."""
        while self._running and self._running[0][2].query():
            record, begin, end = self._running.pop(0)
            record.seconds += begin.elapsed_time(end) / 1e3

    def summary(self) -> dict[str, dict[str, float]]:
        """The totals as plain values, for the log."""
        return {name: asdict(record) for name, record in self.records.items()}

    def state_dict(self) -> dict[str, Any]:
        """State to save: the totals."""
        return {"records": self.summary()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._running.clear()
        self._records = {name: PhaseRecord(**record) for name, record in state["records"].items()}

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """Convert the state for another number of ranks: rank 0 takes over the tokens of all ranks."""
        changes = {"tokens": 0} if rank else {}
        records = over_ranks([state["records"] for state in states])
        return {"records": {name: {**record, **changes} for name, record in records.items()}}


def _now() -> torch.cuda.Event:
    """Record an event after all work queued on the GPU so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def over_ranks(summaries: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Merge the summaries of several ranks: tokens are added; for everything else the maximum is taken."""
    names = {name: None for summary in summaries for name in summary}
    found = {name: [summary[name] for summary in summaries if name in summary] for name in names}
    return {
        name: {key: (sum if key == "tokens" else max)(part[key] for part in parts) for key in parts[0]}
        for name, parts in found.items()
    }
