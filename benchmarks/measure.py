"""How one process is measured: a clock per step, and its memory as the kernel or the GPU's allocator counts it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

# First touch of memory is slow on virtual machines, and the allocator would hand it back after each step and fault it
# in again: glibc is told to keep it. Both sides get the same.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "999999999999",
    "MALLOC_TOP_PAD_": "268435456",
}
# Weights, gradients and two moments of AdamW, in fp32.
TRAINING_BYTES = 16
# Weights alone.
FROZEN_BYTES = 4


class Instant(NamedTuple):
    """Seconds of wall clock and of processor time (all threads)."""

    wall: float
    cpu: float


class StepClock(TrainerCallback):
    """Notes the end of every optimizer step.

    A step lasts from the end of the one before to its own: fetching its rows, collating, logging and the trainer's own
    bookkeeping are part of it.
    """

    def __init__(self) -> None:
        self.ends: list[Instant] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """transformers calls this after each update."""
        self.ends.append(Instant(time.perf_counter(), time.process_time()))

    def steps(self, warm_up: int) -> list[Instant]:
        """How long each step after the first ``warm_up`` (at least one) took."""
        ends = self.ends[warm_up - 1 :]
        return [Instant(b.wall - a.wall, b.cpu - a.cpu) for a, b in zip(ends, ends[1:])]


class DeviceClock(StepClock):
    """A clock that waits for the GPU at every step's end, and notes how much of its memory is reserved by then."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """transformers calls this after each update."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            # Each phase starts the peak anew; reserved memory grows only, but for what an OOM retry gives back.
            self.reserved = max(self.reserved, torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
        super().on_step_end(args, state, control, **kwargs)


def cap_memory(limit: int) -> None:
    """Let this process allocate at most so many bytes of the GPU."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))


def peak_of_phases(trainer: Any) -> int:
    """The most memory that any phase of our trainer's training allocated, in bytes; loading is not among them."""
    return max(record.peak_bytes for record in trainer.phases.records.values())


def describe_gpu(limit_gb: float) -> str:
    """Name and size of the GPU, and the cap."""
    size = torch.cuda.mem_get_info()[1] / 1e9
    return f"{torch.cuda.get_device_name()} ({size:.0f} GB, capped at {limit_gb:g} GB)"


def arbitrary(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Scores that differ, at no cost: what is measured is training."""
    return [float(sum(ids) % 1009) for ids in completion_ids]


def memory_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process, from Linux's ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def working_memory(high_water: int, before: int, trained: int, frozen: int = 0) -> int:
    """Bytes over what any trainer of this model needs: activations, logits, copies, a reference, and waste.

    Args:
        high_water: highest resident size, in bytes.
        before: resident size before the model.
        trained: parameters that are trained, at 16 bytes each.
        frozen: parameters that are not, at 4 bytes each: of the base under adapters, and of models beside the policy.
    """
    return high_water - before - TRAINING_BYTES * trained - FROZEN_BYTES * frozen
