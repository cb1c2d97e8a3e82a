"""Run the two sides of a comparison as processes: prepare the rows of both, and run one side."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import METHODS, Job, SideName, write_rows
from benchmarks.measure import ALLOCATOR
from benchmarks.processes import Failed, free_port, run_module
from benchmarks.shapes import Shape
from benchmarks.worker import Result


def prepare(job: Job, shape: Shape, threads: int, seconds: float | None = None) -> Job:
    """Write the rows of a job's method, and for TRL the same rows in the order in which our side uses them."""
    folder = Path(job.model).parent
    rows = METHODS[job.method].rows(shape, job.steps * job.rows_of_a_step, 0)
    place, path = folder / f"{job.method}-order", folder / f"{job.method}-ours.jsonl"
    job = replace(job, rows=str(path), output=str(place / "output"))
    write_rows(path, rows)
    taken = _run("benchmarks.ours", job, place, threads, seconds)
    write_rows(folder / f"{job.method}-trl.jsonl", [rows[number] for number in taken])
    return job


def run_side(job: Job, side: SideName, repeat: int, threads: int, seconds: float | None = None) -> Result:
    """Run one side once."""
    setting = f"{job.stage}-{job.checkpointing:d}-{job.lora:d}-{job.in_4bit:d}"
    place = Path(job.model).parent / f"{job.method}-{setting}-{side}-{repeat}"
    rows = job.rows if side == "ours" else in_order(job)
    job = replace(job, side=side, rows=rows, output=str(place / "output"))
    return Result(**_run("benchmarks.worker", job, place, threads, seconds))


def in_order(job: Job) -> str:
    """Return the file of a prepared job's rows in the order of the steps."""
    return job.rows.replace("-ours.jsonl", "-trl.jsonl")


def _run(module: str, job: Job, place: Path, threads: int, seconds: float | None) -> Any:
    """Return a process's result for the job; allocator, threads and accelerator are the same for both sides."""
    variables = {
        **(_on_gpu() if job.gpu else ALLOCATOR),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cuda" if job.gpu else "cpu",
    }
    if job.side == "trl" and job.stage:
        # accelerate only initializes DeepSpeed if it finds a launcher's variables.
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        return run_module(module, place, asdict(job), variables, seconds)
    except Failed as error:
        raise Failed(f"{job.side}, {job.method}, {job.setting.title}: {error.reason}", error.output) from error


def _on_gpu() -> dict[str, str]:
    """Return variables for one GPU: transformers' trainer would otherwise use all visible GPUs."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
