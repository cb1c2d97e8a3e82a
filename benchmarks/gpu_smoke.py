"""The driver of ``gpu_smoke.sh``, which describes its purpose: plans the rows and runs each in a separate process."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from alignment.config.lookup import packaged_names  # noqa: E402
from benchmarks.comparison import title  # noqa: E402
from benchmarks.gpu_checks import CHECKS, CheckJob  # noqa: E402
from benchmarks.gpu_row import RowJob, RowResult  # noqa: E402
from benchmarks.measure import describe_gpu  # noqa: E402
from benchmarks.processes import Failed, run_module  # noqa: E402
from benchmarks.shapes import HALF_BILLION, TINY, write_model  # noqa: E402

_GIB = 2**30
_MODEL = "model"
_ROLLOUTS = ("zero2", "zero3_offload")  # unpartitioned weights, and weights that a rollout has to gather
_WHOLE_TABLE = 570.0  # seconds: less than ten minutes including creation of the model


def plan(options: argparse.Namespace, folder: Path) -> list[RowJob]:
    """Plan a row for every policy file, for KTO and CPO; further reference files of KTO use the default policy file.

    Online DPO has two rows: its training step is CPO's with a reference, and a rollout depends only on the stage.
    """
    policies = [name for name in packaged_names("ds_configs") if not name.startswith("ref_")]
    placements = [name.removeprefix("ref_") for name in packaged_names("ds_configs") if name.startswith("ref_")]
    kto = [(policy, "offload") for policy in policies] + [("zero2", p) for p in placements if p != "offload"]
    wanted = [("kto", *pair) for pair in kto] + [("cpo", policy, None) for policy in policies]
    wanted += [("online_dpo", policy, "offload") for policy in _ROLLOUTS]
    shape = TINY if options.tiny else HALF_BILLION
    jobs = [
        RowJob(
            *row,
            model=str(folder / _MODEL),
            output=str(folder / f"row{number}" / "output"),
            shape=asdict(shape),
            batch=4,
            steps=options.steps,
            cpu=options.cpu,
            limit=round(options.limit_gb * 1e9),
        )
        for number, row in enumerate(wanted)
    ]
    return [job for job in jobs if not options.rows or any(part in job.name for part in options.rows)]


def planned_checks(options: argparse.Namespace, model: Path) -> list[CheckJob]:
    """Return the checks to run: all, on a CPU those that do not need a GPU; none if only rows are selected."""
    if options.checks is None and options.rows:
        return []
    jobs = [
        CheckJob(name, str(model), options.cpu) for name, check in CHECKS.items() if not (options.cpu and check.cuda)
    ]
    return [job for job in jobs if not options.checks or any(part in job.name for part in options.checks)]


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and the rows, print both tables, return the exit status."""
    options = _parse(arguments)
    if not options.cpu and not torch.cuda.is_available():
        print("torch finds no CUDA GPU; use --cpu --tiny to run the same rows on a CPU", file=sys.stderr)
        return 2
    failed = False
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as name:
        folder = Path(name)
        jobs, checks = plan(options, folder), planned_checks(options, folder / _MODEL)
        if not jobs:
            print(f"--rows {' '.join(options.rows)}: no row matches", file=sys.stderr)
            return 2
        if options.checks and not checks:
            print(f"--checks {' '.join(options.checks)}: no check matches", file=sys.stderr)
            return 2
        shape = TINY if options.tiny else HALF_BILLION
        # Half the size on disk; runs on a CPU compute in fp32 anyway.
        parameters = write_model(folder / _MODEL, shape, dtype=torch.bfloat16)
        size = f"{parameters / 1e6:.2f} million parameters"
        print(f"{_machine(options)}. {shape.describe()}, {size}, {options.steps} steps\n")
        if checks:
            print("| check | found |\n|---|---|", flush=True)
        for number, check in enumerate(checks):
            line, ok = _check(check, folder / f"check{number}", options.seconds)
            failed = failed or not ok
            print(line, flush=True)
        if options.checks and not options.rows:
            return int(failed)
        end = time.monotonic() + _WHOLE_TABLE
        print("\n| method | policy | reference | s/step | allocated | reserved | host | tokens/s |", flush=True)
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for job in jobs:
            line, ok = _row(job, min(options.seconds, end - time.monotonic()))
            failed = failed or not ok
            print(line, flush=True)
    return int(failed)


def _check(job: CheckJob, place: Path, seconds: float) -> tuple[str, bool]:
    """Return the check's line of its table and whether it passed; a failure's whole output goes to stderr."""
    environment = {"DS_ACCELERATOR": "cpu" if job.cpu else "cuda"}
    try:
        return (
            f"| {job.name} | {run_module('benchmarks.gpu_checks', place, asdict(job), environment, seconds)} |",
            True,
        )
    except Failed as error:
        print(error.output, file=sys.stderr, flush=True)
        return f"| {job.name} | failed: {error.reason[:200].replace('|', '/')} |", False


def _row(job: RowJob, seconds: float) -> tuple[str, bool]:
    """Return the row's line of the table and whether it trained; a failure's whole output goes to stderr."""
    start = f"| {title(job.method)} | {job.policy} | {job.reference or '-'} |"
    environment = {"DS_ACCELERATOR": "cpu" if job.cpu else "cuda"}
    try:
        if seconds <= 0:
            raise Failed(f"not run: the time limit of {_WHOLE_TABLE:.0f} s for the table was reached")
        answer = run_module("benchmarks.gpu_row", Path(job.output).parent, asdict(job), environment, seconds)
    except Failed as error:
        print(error.output, file=sys.stderr, flush=True)
        return f"{start} failed: {error.reason[:200].replace('|', '/')} | | | | |", False
    result = RowResult(**answer)
    sizes = " | ".join(f"{size / _GIB:.2f} GiB" for size in (result.allocated, result.reserved, result.host))
    return f"{start} {result.step:.2f} | {sizes} | {result.tokens_per_second:.0f} |", True


def _machine(options: argparse.Namespace) -> str:
    if options.cpu:
        return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{describe_gpu(options.limit_gb)}, torch {torch.__version__}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", default=[], help="run only rows whose METHOD/POLICY/REFERENCE contains one of these"
    )
    parser.add_argument(
        "--checks", nargs="+", help="run only checks whose name contains one of these, and no rows without --rows"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run on the CPU in fp32; device memory is then reported as 0"
    )
    parser.add_argument("--tiny", action="store_true", help="use a model of a few thousand parameters")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps per row (default: 5)")
    parser.add_argument(
        "--limit_gb", type=float, default=24.0, help="GPU memory limit per process in units of 1e9 bytes (default: 24)"
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit per row (default: 90)")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be 2 or more: the first is not timed")
    return options


if __name__ == "__main__":
    sys.exit(main())
