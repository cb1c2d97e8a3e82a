"""Phases: the unit of measuring and of memory. Each has a name, a time, a number of tokens and a peak of memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch


@dataclass
class PhaseRecord:
    """Totals of a phase on this rank: seconds, tokens, peak bytes of device memory (0 on a CPU), times entered."""

    seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int = 0
    entries: int = 0


class Phases:
    """Times named stretches of work; ``records`` has the totals by name."""

    def __init__(self, device: torch.device) -> None:
        self.records: dict[str, PhaseRecord] = {}
        self._cuda = device if device.type == "cuda" else None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[PhaseRecord]:
        """Measure the body as part of phase ``name``, whether it returns or raises; it adds its tokens itself."""
        record = self.records.setdefault(name, PhaseRecord())
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        start = time.monotonic()
        try:
            yield record
        finally:
            if self._cuda is not None:
                torch.cuda.synchronize(self._cuda)
                record.peak_bytes = max(record.peak_bytes, torch.cuda.max_memory_allocated(self._cuda))
            record.seconds += time.monotonic() - start
            record.entries += 1

    def summary(self) -> dict[str, dict[str, float]]:
        """The totals as plain numbers, for the log."""
        return {name: asdict(record) for name, record in self.records.items()}
