"""Run one side once in this process: ``python -m benchmarks.worker JOB.json RESULT.json``. Started by the driver."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alignment.engines.memory import grow_segments
from benchmarks.jobs import Job
from benchmarks.measure import DeviceClock, StepClock, cap_memory, memory_bytes, working_memory


@dataclass(frozen=True)
class Result:
    """The results of one run.

    Attributes:
        wall: seconds of each measured step.
        cpu: CPU seconds of each measured step.
        memory: bytes, as defined by :func:`benchmarks.measure.working_memory`.
        first: logged metrics of the first step.
        allocated, reserved: maximum bytes of GPU memory without loading; 0 on a CPU.
    """

    wall: list[float]
    cpu: list[float]
    memory: int
    first: dict[str, float]
    allocated: int = 0
    reserved: int = 0


def measure(job: Job) -> Result:
    """Run the job and measure it; code and rows are loaded before the first measurement of memory."""
    if job.gpu:
        grow_segments()  # done automatically on our side
        cap_memory(job.limit)
    side = importlib.import_module("benchmarks.ours" if job.side == "ours" else "benchmarks.theirs")
    if job.stage:
        import deepspeed  # noqa: F401 - otherwise TRL imports it during the run
    if job.lora:
        import peft  # noqa: F401 - otherwise both sides import it during the run
    from datasets import Dataset
    from transformers import LlamaForCausalLM  # noqa: F401 - the model's code, otherwise imported later

    rows, clock = Dataset.from_list(job.load_rows()), DeviceClock() if job.gpu else StepClock()
    before = memory_bytes("VmRSS")
    trainer: Any = side.build(job, rows)
    trainer.add_callback(clock)
    if job.gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    high_water = memory_bytes("VmHWM")
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in trainer.model.parameters() if not p.requires_grad)
    steps = clock.steps(job.warm_up)
    return Result(
        wall=[step.wall for step in steps],
        cpu=[step.cpu for step in steps],
        memory=working_memory(high_water, before, trained, frozen + job.frozen * (frozen or trained)),
        first=next(record for record in trainer.state.log_history if "loss" in record),
        allocated=side.peak_bytes(trainer) if job.gpu else 0,
        reserved=clock.reserved if isinstance(clock, DeviceClock) else 0,
    )


if __name__ == "__main__":
    job_file, result_file = sys.argv[1:]
    Path(result_file).write_text(json.dumps(asdict(measure(Job.read(job_file)))), encoding="utf-8")
