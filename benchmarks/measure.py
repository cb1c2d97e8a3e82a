"""Measure a process: time per step, and memory as reported by the kernel or by the GPU's allocator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

# First-touch page faults are slow on virtual machines, and by default glibc returns memory after each step and faults
# it in again, so it is configured to keep it, on both sides.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "999999999999",
    "MALLOC_TOP_PAD_": "268435456",
}
# fp32 weights, gradients and two AdamW moments.
TRAINING_BYTES = 16
# Weights only.
FROZEN_BYTES = 4


class Instant(NamedTuple):
    """Seconds of wall time and of CPU time (all threads)."""

    wall: float
    cpu: float


class StepClock(TrainerCallback):
    """Records the end of every optimizer step.

    A step lasts from the end of the previous step to its own end, including fetching its rows, collation, logging and
    the trainer's bookkeeping.
    """

    def __init__(self) -> None:
        self.ends: list[Instant] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by transformers after each update."""
        self.ends.append(Instant(time.perf_counter(), time.process_time()))

    def steps(self, warm_up: int) -> list[Instant]:
        """Return the duration of each step after the first ``warm_up`` (at least one)."""
        ends = self.ends[warm_up - 1 :]
        return [Instant(b.wall - a.wall, b.cpu - a.cpu) for a, b in zip(ends, ends[1:])]


class DeviceClock(StepClock):
    """A clock that synchronizes with the GPU at the end of every step, and records its reserved memory."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by transformers after each update."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            # Each phase resets the peak; reserved memory only grows, except for what an OOM retry releases.
            self.reserved = max(self.reserved, torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
        super().on_step_end(args, state, control, **kwargs)


def cap_memory(limit: int) -> None:
    """Limit the GPU memory that this process may allocate."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))


def peak_of_phases(trainer: Any) -> int:
    """Return the maximum bytes that any phase of our trainer's training allocated, without loading."""
    return max(record.peak_bytes for record in trainer.phases.records.values())


def describe_gpu(limit_gb: float) -> str:
    """Describe the GPU's name and size, and the cap."""
    size = torch.cuda.mem_get_info()[1] / 1e9
    return f"{torch.cuda.get_device_name()} ({size:.0f} GB, capped at {limit_gb:g} GB)"


def arbitrary(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return scores that differ at no cost, since only training is measured."""
    return [float(sum(ids) % 1009) for ids in completion_ids]


def memory_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (maximum so far) of this process from Linux's ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def working_memory(high_water: int, before: int, trained: int, frozen: int = 0) -> int:
    """Return bytes beyond what any trainer of this model needs: activations, logits, copies, a reference, overhead.

    Args:
        high_water: maximum resident size in bytes.
        before: resident size before the model was loaded.
        trained: number of trained parameters, at 16 bytes each.
        frozen: number of frozen parameters, at 4 bytes each: of the base model under adapters, and of other models.
    """
    return high_water - before - TRAINING_BYTES * trained - FROZEN_BYTES * frozen
