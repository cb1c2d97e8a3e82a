"""Compare KTO, CPO and Online DPO with TRL's: time per step and memory, for a fixed shape, on a CPU or a GPU.

    python benchmarks/side_by_side.py                      # about 40 minutes on 2 cores
    python benchmarks/side_by_side.py --method cpo --repeats 1
    python benchmarks/side_by_side.py --no-zero2           # without the rows where both use ZeRO-2
    python benchmarks/side_by_side.py --lora               # adapters on both sides, r = 16 on all linear layers
    python benchmarks/side_by_side.py --gpu                # on a GPU, each side capped at 24 GB: full, LoRA and QLoRA
    python benchmarks/side_by_side.py --gpu --settings qlora --method kto --batch 8

Requires TRL: ``pip install ".[bench]"``. Each side runs in a separate process, with the same allocator settings and
the same number of threads; the sides alternate. Both read the same rows in the same order, which the logged metrics of
the first step must confirm. The settings that were aligned are listed in ``benchmarks/theirs.py``.

Memory is the maximum resident size (VmHWM) - the resident size before the model - 16 bytes per parameter (weights,
gradients, AdamW), and for Online DPO - 4 bytes per parameter of reference and reward model; with ``--lora`` - 4 bytes
per parameter of the base model and 16 per trained one, and - 4 per parameter of the reward model. At stage 0, compared
with plain TRL, there are requirements; at ZeRO-2 the results are only reported. Exits with status 1 if a requirement
is not met, with 2 if it cannot run. With ``--gpu`` (:mod:`benchmarks.gpu_sides`), runs only have to succeed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.comparison import Comparison, compare, differences, table, title  # noqa: E402
from benchmarks.gpu_sides import LIMIT_GB, SECONDS, SETTINGS, compare_on_gpu, this_machine  # noqa: E402
from benchmarks.jobs import LORA_SETTINGS, METHODS, Job  # noqa: E402
from benchmarks.processes import Failed  # noqa: E402
from benchmarks.shapes import SHAPES, Shape, write_model, write_reward_model  # noqa: E402
from benchmarks.sides import prepare, run_side  # noqa: E402
from benchmarks.worker import Result  # noqa: E402


def main(arguments: list[str] | None = None, shape: Shape | None = None) -> int:
    """Compare, print the table, return the exit status."""
    options = _parse(arguments)
    shape = shape or SHAPES[options.shape]
    if options.gpu and not torch.cuda.is_available():
        print("torch finds no CUDA GPU; omit --gpu to run the comparison on the CPU", file=sys.stderr)
        return 2
    if importlib.util.find_spec("trl") is None:
        print('TRL is not installed: pip install ".[bench]"', file=sys.stderr)
        return 2
    if options.gpu:
        return compare_on_gpu(options, this_machine(options.limit_gb))
    found: list[Comparison] = []
    try:
        with tempfile.TemporaryDirectory(prefix="side-by-side-") as folder:
            write_model(Path(folder) / "model", shape)
            write_reward_model(Path(folder) / "reward", shape)
            for method in options.method:
                job = prepare(_job(Path(folder), method, options), shape, options.threads)
                for setting in METHODS[method].floors:
                    if setting.lora == options.lora and (options.zero2 or setting.stage == 0):
                        found.append(_compare(replace(job, **asdict(setting)), options.repeats, options.threads))
    except Failed as error:
        print(f"{error.output}\n{error.reason}".lstrip(), file=sys.stderr)
        return 2
    print(f"\n{_conditions(options, shape)}\n\n{table(found)}\n")
    missed = [sentence for comparison in found for sentence in comparison.missed()]
    print("\n".join(f"not met: {sentence}" for sentence in missed) or "all requirements are met")
    return 1 if missed else 0


def _job(folder: Path, method: str, options: argparse.Namespace) -> Job:
    reward = str(folder / "reward") if method == "online_dpo" else ""
    total = options.steps + options.warm_up
    return Job("ours", method, str(folder / "model"), "", "", total, options.warm_up, reward_model=reward)


def _compare(job: Job, repeats: int, threads: int) -> Comparison:
    ours, theirs = [], []
    for repeat in range(repeats):
        ours.append(run_side(job, "ours", repeat, threads))
        theirs.append(run_side(job, "trl", repeat, threads))
        print(_progress(job, repeat, ours[-1], theirs[-1]), flush=True)
        differing = differences(job.method, ours[-1], theirs[-1])
        if differing:
            raise Failed(f"{job.method}: the first steps of the sides differ: {'; '.join(differing)}")
    return compare(job.method, job.setting, ours, theirs)


def _progress(job: Job, repeat: int, ours: Result, theirs: Result) -> str:
    one = compare(job.method, job.setting, [ours], [theirs])
    return (
        f"{job.method}, {job.setting.title}, repeat {repeat + 1}: ours {one.ours:.2f} s, {one.our_memory / 2**20:.0f} "
        f"MiB; TRL {one.theirs:.2f} s, {one.their_memory / 2**20:.0f} MiB"
    )


def _conditions(options: argparse.Namespace, shape: Shape) -> str:
    """Describe machine, versions and settings."""
    names = ("torch", "transformers", "deepspeed", "trl", "accelerate")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    batches = ", ".join(f"{title(m)} {METHODS[m].batch} rows" for m in options.method)
    lora = f"LoRA r = {LORA_SETTINGS['r']} on all linear layers, " if options.lora else ""
    return (
        f"{_processor()}, {os.cpu_count()} cores, {options.threads} threads; Python {platform.python_version()}, "
        f"{versions}. {shape.describe()}; {batches} a step; fp32, {lora}gradient checkpointing (non-reentrant), "
        "torch AdamW; "
        f"{options.steps} steps after {options.warm_up} warm-up steps, {options.repeats} repeats, medians."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--shape", choices=list(SHAPES), default="head", help="what takes most of the time")
    parser.add_argument("--repeats", type=int, default=3, help="runs per side, alternating (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per run (default: 10)")
    parser.add_argument("--warm_up", type=int, default=3, help="warm-up steps per run (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads per side (default: all cores)"
    )
    parser.add_argument(
        "--zero2",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also compare both with ZeRO-2 (default: yes)",
    )
    parser.add_argument("--lora", action="store_true", help="train adapters on both sides at stage 0")
    card = parser.add_argument_group("on a GPU")
    card.add_argument("--gpu", action="store_true", help="train a 0.5B model on the GPU in bf16 or fp16")
    card.add_argument("--settings", nargs="+", choices=SETTINGS, help="what to train (default: full lora qlora)")
    card.add_argument(
        "--limit_gb", type=float, help=f"GPU memory limit per side in units of 1e9 bytes (default: {LIMIT_GB:g})"
    )
    card.add_argument("--batch", type=int, help="rows per step (default: KTO 4, others 2)")
    card.add_argument("--seconds", type=float, help=f"time limit per run (default: {SECONDS:g})")
    card.add_argument("--tiny", action="store_true", help="use a model of a few thousand parameters, as a smoke test")
    options = parser.parse_args(arguments)
    chosen = [
        name
        for name in ("settings", "limit_gb", "batch", "seconds", "tiny")
        if getattr(options, name) not in (None, False)
    ]
    if chosen and not options.gpu:
        parser.error(f"--{chosen[0]} requires --gpu")
    if options.gpu and options.lora:
        parser.error("--lora: use --settings lora with --gpu")
    if options.batch is not None and options.batch < 2:
        parser.error("--batch must be 2 or more: KTO's KL term uses other rows of the batch")
    options.settings = options.settings or list(SETTINGS)
    options.limit_gb = LIMIT_GB if options.limit_gb is None else options.limit_gb
    options.seconds = SECONDS if options.seconds is None else options.seconds
    if min(options.limit_gb, options.seconds) <= 0:
        parser.error("--limit_gb and --seconds must be above 0")
    if min(options.repeats, options.steps, options.warm_up, options.threads) < 1:
        parser.error("--repeats, --steps, --warm_up and --threads must be 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
