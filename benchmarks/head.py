"""Compare the log-prob head with others: passes over a tile of logits, time and memory of forward and backward.

    python benchmarks/head.py                                   # on a GPU if there is one
    python benchmarks/head.py --tokens 512 --width 256 --threads 1
    python benchmarks/head.py --only_passes

It is compared with TRL's fused head (``pip install ".[bench]"``; skipped if TRL is not installed), torch's
``linear_cross_entropy`` and the full matrix of logits, including the gradients of hidden states and weight. Each is
measured in a separate process, alternately. Ratios are medians of per-turn time ratios. Memory is what an
implementation needs beyond its inputs and their gradients, the maximum over the turns. Exits with status 1 if
implementations disagree about the sum of the log-probs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, to count memory accesses

from benchmarks.head_worker import FULL, KERNELS, OURS, TORCH, TRL, HeadJob, HeadResult  # noqa: E402
from benchmarks.measure import ALLOCATOR  # noqa: E402
from benchmarks.passes import passes  # noqa: E402
from benchmarks.processes import Failed, run_module  # noqa: E402

_MIB = 2**20
_AGREE = 1e-3  # relative; other implementations round logits to bf16


def chosen_ways(on_gpu: bool) -> list[str]:
    """Return the implementations that can be measured here."""
    ways = [OURS, KERNELS] if on_gpu and importlib.util.find_spec("triton") else [OURS]
    ways += [TRL] if importlib.util.find_spec("trl") else []
    ways += [TORCH] if hasattr(torch.nn.functional, "linear_cross_entropy") else []
    return [*ways, FULL]


def measure(job: HeadJob, ways: Sequence[str], repeats: int) -> dict[str, list[HeadResult]]:
    """Return the results of every implementation, one per turn.

    Raises:
        Failed: if a process fails.
    """
    found: dict[str, list[HeadResult]] = {way: [] for way in ways}
    threads = {"OMP_NUM_THREADS": str(job.threads), "TRITON_INTERPRET": "0"}
    with tempfile.TemporaryDirectory(prefix="head-") as folder:
        for repeat in range(repeats):
            for number, way in enumerate(ways):
                place = Path(folder) / f"{repeat}-{number}"
                answer = run_module(
                    "benchmarks.head_worker", place, asdict(replace(job, way=way)), ALLOCATOR | threads
                )
                found[way].append(HeadResult(**answer))
    return found


def table(found: dict[str, list[HeadResult]]) -> str:
    """Return a Markdown table; ratios above 1 favor the first implementation."""
    heads = ("head", "forward", "backward", "both", "time ratio", "CPU time ratio", "memory")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    first = next(iter(found.values()))
    for way, results in found.items():
        forward, backward = (
            statistics.median(getattr(result, part) for result in results) for part in ("forward", "backward")
        )
        both = [result.forward + result.backward for result in results]
        ratio = statistics.median(own / (one.forward + one.backward) for own, one in zip(both, first))
        busy = statistics.median(own.processor / one.processor for own, one in zip(results, first))
        memory = max(result.memory for result in results) / _MIB
        times = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in (forward, backward, statistics.median(both)))
        lines.append(f"| {way} | {times} | {ratio:.2f} | {busy:.2f} | {memory:.0f} MiB |")
    return "\n".join(lines)


def disagreements(found: dict[str, list[HeadResult]]) -> list[str]:
    """Return implementations whose sum of log-probs differs from that of the full matrix."""
    expected = found[FULL][0].total
    return [
        f"{way}: the log-probs sum to {result.total:g}, those of full logits to {expected:g}"
        for way, results in found.items()
        for result in results[:1]
        if not abs(result.total - expected) <= _AGREE * abs(expected)
    ]


def passes_table() -> str:
    """Return passes over a tile of fp32 logits with statistics; Triton kernels are included if they can be counted."""
    from alignment.models.tiles.choice import fused_tiles

    lines = ["| tile, statistics on | forward | backward |", "|---|---|---|"]
    ways = {"torch": "torch's operations"}
    try:
        fused_tiles()
    except ImportError as error:
        print(f"skipping the passes of the kernels: {error}")
    else:
        if os.environ.get("TRITON_INTERPRET") == "1":
            ways["triton"] = "Triton kernels"
    for way, title in ways.items():
        for dtype in (torch.float32, torch.bfloat16):
            found = passes(way, dtype)
            lines.append(f"| {title}, {str(dtype)[6:]} | {found.forward:.1f} | {found.backward:.1f} |")
    return "\n".join(lines)


def _conditions(given: argparse.Namespace, device: str) -> str:
    names = [name for name in ("torch", "triton", "trl") if importlib.util.find_spec(name)]
    hardware = torch.cuda.get_device_name() if device != "cpu" else f"{platform.processor() or platform.machine()} CPU"
    return (
        f"{hardware}, threads: {given.threads}; {', '.join(f'{name} {version(name)}' for name in names)}. "
        f"{given.tokens} tokens, width {given.width}, vocabulary {given.vocabulary}, {given.dtype}; "
        f"{given.repeats} turns of {given.rounds} rounds, medians."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, bfloat16 on a GPU"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns per implementation (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured passes per turn, after one warm-up pass (default: 5)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU even if there is a GPU")
    parser.add_argument("--only_passes", action="store_true", help="only count passes")
    given = parser.parse_args(arguments)
    print(passes_table(), flush=True)
    if given.only_passes:
        return 0
    device = "cuda" if torch.cuda.is_available() and not given.cpu else "cpu"
    given.dtype = given.dtype or ("float32" if device == "cpu" else "bfloat16")
    sizes = (given.tokens, given.width, given.vocabulary)
    ways = chosen_ways(device != "cpu")
    if TRL not in ways:
        print('TRL is not installed and will be skipped; to include it: pip install ".[bench]"', file=sys.stderr)
    try:
        found = measure(HeadJob(OURS, *sizes, given.dtype, device, given.rounds, given.threads), ways, given.repeats)
    except Failed as error:
        print(f"{error.output}\n{error.reason}".lstrip(), file=sys.stderr)
        return 2
    print(f"\n{table(found)}\n\n{_conditions(given, device)}")
    wrong = disagreements(found)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
