"""``side_by_side.py --gpu``: both sides on one GPU, each in a process with the same cap; plan, runs and table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from alignment.config.dtypes import computes_bf16, computes_fp16
from benchmarks.comparison import ALIKE, ALIKE_16, compare, differences, title
from benchmarks.jobs import METHODS, NEW_TOKENS, Job, Precision, Setting, SideName
from benchmarks.measure import describe_gpu
from benchmarks.processes import Failed
from benchmarks.shapes import HALF_BILLION, TINY, Shape, tokens_of, write_model
from benchmarks.sides import in_order, prepare, run_side
from benchmarks.worker import Result

SETTINGS = ("full", "lora", "qlora")
LIMIT_GB, SECONDS = 24.0, 900.0
_GIB = 2**30
_SIDES: tuple[SideName, SideName] = ("ours", "trl")
_NO_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED")
_COLUMNS = "method|training|step, ours|step, TRL|speedup|tokens/s, ours|tokens/s, TRL|" + "|".join(
    f"{kind}, {side}" for kind in ("allocated", "reserved") for side in ("ours", "TRL")
)


@dataclass(frozen=True)
class Machine:
    """The machine of both sides: ``gpu`` or the CPU, the compute precision, the cap in bytes, and a description."""

    gpu: bool
    precision: Precision
    limit: int
    described: str


@dataclass
class Outcome:
    """The results of both sides in one setting.

    Attributes:
        job: the job, with the setting.
        results: results of each side by repeat.
        failed: why a side has no results.
        tokens: number of tokens in the rows of all measured steps.
        differing: differences between the first steps of both sides.
    """

    job: Job
    results: dict[SideName, list[Result]] = field(default_factory=lambda: {"ours": [], "trl": []})
    failed: dict[SideName, str] = field(default_factory=dict)
    tokens: int = 0
    differing: list[str] = field(default_factory=list)


def this_machine(limit_gb: float) -> Machine:
    """Describe the GPU and the precision that it computes in."""
    precision: Precision = "bf16" if computes_bf16() else "fp16" if computes_fp16() else "fp32"
    described = f"{describe_gpu(limit_gb)}, driver {_driver()}, CUDA {torch.version.cuda}"
    return Machine(True, precision, round(limit_gb * 1e9), described)


def planned(options: argparse.Namespace) -> dict[str, list[Setting]]:
    """Return the settings of each method: those of the CPU comparison, and LoRA's with a 4-bit base for QLoRA."""
    plan = {}
    for method in options.method:
        known = [s for s in METHODS[method].floors if options.zero2 or s.stage == 0]
        adapters = [s for s in known if s.lora]
        kinds = {
            "full": [s for s in known if not s.lora],
            "lora": adapters,
            "qlora": [replace(s, in_4bit=True) for s in adapters],
        }
        plan[method] = [s for name in options.settings for s in kinds[name]]
    return plan


def compare_on_gpu(options: argparse.Namespace, machine: Machine) -> int:
    """Run every row and print the table; return 1 if a side failed or the sides' first steps differ, else 0."""
    outcomes: list[Outcome] = []
    shape = TINY if options.tiny else HALF_BILLION
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name:
        parameters = write_model(Path(name) / "model", shape)
        for method, settings in planned(options).items():
            job = _job(Path(name), method, shape, options, machine)
            for outcome in _rows(job, shape, settings, options):
                outcomes.append(outcome)
    print(f"\n{_conditions(options, machine, shape, parameters)}\n\n{gpu_table(outcomes)}\n")
    notes = [f"{_name(one)}: {side}: {why}" for one in outcomes for side, why in one.failed.items()]
    notes += [f"{_name(one)}: first steps differ: {'; '.join(one.differing)}" for one in outcomes if one.differing]
    print("\n".join(notes) or "all rows ran on both sides, and their first steps agree")
    return int(bool(notes))


def _job(folder: Path, method: str, shape: Shape, options: argparse.Namespace, machine: Machine) -> Job:
    """Return the job of a method without a setting; its prompts are never truncated."""
    online = method == "online_dpo"
    return Job(
        "ours",
        method,
        str(folder / "model"),
        rows="",
        output="",
        steps=options.steps + options.warm_up,
        warm_up=options.warm_up,
        batch=options.batch or METHODS[method].batch // 2,
        max_length=shape.most + (NEW_TOKENS if online else 0),
        gpu=machine.gpu,
        limit=machine.limit,
        precision=machine.precision,
    )


def _rows(job: Job, shape: Shape, settings: Sequence[Setting], options: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcome of each setting of a method; if its rows cannot be prepared, all fail."""
    if not settings:
        return
    try:
        job = prepare(job, shape, options.threads, options.seconds)
    except Failed as error:
        print(error.output, file=sys.stderr, flush=True)
        for setting in settings:
            failed: dict[SideName, str] = {"ours": _reason(error), "trl": "not run: its rows are prepared by our side"}
            yield Outcome(replace(job, **asdict(setting)), failed=failed)
        return
    for setting in settings:
        yield _turns(Outcome(replace(job, **asdict(setting)), tokens=_measured_tokens(job)), options)


def _turns(outcome: Outcome, options: argparse.Namespace) -> Outcome:
    """Run both sides alternately; a side that has failed is not run again, and the other continues."""
    for repeat in range(options.repeats):
        for side in _SIDES:
            if side in outcome.failed:
                continue
            try:
                result = run_side(outcome.job, side, repeat, options.threads, options.seconds)
            except Failed as error:
                print(error.output, file=sys.stderr, flush=True)
                outcome.failed[side] = _reason(error)
                print(f"{_name(outcome)}, repeat {repeat + 1}: {side} {outcome.failed[side]}", flush=True)
                continue
            outcome.results[side].append(result)
            print(f"{_name(outcome)}, repeat {repeat + 1}: {side} {median(result.wall):.3f} s", flush=True)
    if not outcome.failed:
        alike = ALIKE if outcome.job.precision == "fp32" else ALIKE_16
        for one, other in zip(outcome.results["ours"], outcome.results["trl"], strict=True):
            outcome.differing = outcome.differing or differences(outcome.job.method, one, other, alike)
    return outcome


def _reason(error: Failed) -> str:
    """Return why the process failed, without the name of the run."""
    return error.__cause__.reason if isinstance(error.__cause__, Failed) else error.reason


def _measured_tokens(job: Job) -> int:
    """Count the tokens of the measured steps' rows, which are the last ones; the same for both sides."""
    lines = Path(in_order(job)).read_text(encoding="utf-8").splitlines()
    return sum(tokens_of(json.loads(line), NEW_TOKENS) for line in lines[job.warm_up * job.rows_of_a_step :])


def gpu_table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table, one line per setting; for a side that failed, its reason instead of the step time."""
    columns = _COLUMNS.split("|")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in outcomes:
        cells = {side: _cells(one, side) for side in _SIDES}
        speed = "-"
        if not one.failed:
            ratio = compare(one.job.method, one.job.setting, one.results["ours"], one.results["trl"]).speed
            speed = f"{ratio:.2f}"
        pairs = [cells[side][place] for place in range(4) for side in _SIDES]
        lines.append(f"| {_name(one, ' | ')} | {' | '.join([*pairs[:2], speed, *pairs[2:]])} |")
    return "\n".join(lines)


def _cells(outcome: Outcome, side: SideName) -> tuple[str, str, str, str]:
    """Return seconds per step and tokens per second (medians), and the maximum allocated and reserved memory."""
    why, results = outcome.failed.get(side), outcome.results[side]
    if why is not None:
        out = any(sign in why for sign in _NO_MEMORY)
        return ("out of memory" if out else f"failed: {why[:120].replace('|', '/')}"), "-", "-", "-"
    rate = median(outcome.tokens / sum(result.wall) for result in results)
    sizes = (max(result.allocated for result in results), max(result.reserved for result in results))
    seconds = median(t for result in results for t in result.wall)
    allocated, reserved = (f"{size / _GIB:.2f} GiB" for size in sizes)
    return f"{seconds:.3f} s", f"{rate:.0f}", allocated, reserved


def _name(outcome: Outcome, between: str = ", ") -> str:
    setting = outcome.job.setting
    return f"{title(outcome.job.method)}{between}{'' if setting.lora else 'full, '}{setting.title}"


def _conditions(options: argparse.Namespace, machine: Machine, shape: Shape, parameters: int) -> str:
    """Describe machine, versions and settings."""
    names = ("torch", "deepspeed", "transformers", "trl", "accelerate", "peft", "bitsandbytes")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    batches = ", ".join(f"{title(m)} {options.batch or METHODS[m].batch // 2} rows" for m in options.method)
    return (
        f"{machine.described}; {versions}. {shape.describe()}, {parameters / 1e6:.2f} million parameters; {batches} a "
        f"step; {machine.precision}, gradient checkpointing (non-reentrant), "
        "torch AdamW, LoRA r = 16 on all linear layers; "
        f"{options.steps} steps after {options.warm_up} warm-up steps, {options.repeats} repeats: medians, "
        "maximum memory."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return "not installed"


def _driver() -> str:
    """Return the driver version reported by ``nvidia-smi``."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.split()[0] if answer.split() else "unknown"
