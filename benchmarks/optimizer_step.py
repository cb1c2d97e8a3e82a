"""Time of one optimizer step on the CPU per parameter: torch's AdamW kernels and DeepSpeed's compiled CPU Adam.

This determines which AdamW is used for weights in host memory (a CPU run, or an offloaded optimizer).

    python benchmarks/optimizer_step.py --parameters 40000000

DeepSpeed's op is compiled on first use, which takes minutes and is not measured. Rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import AdamW, Optimizer  # noqa: E402

Make = Callable[[list[nn.Parameter]], Optimizer]
KERNELS: dict[str, Make] = {
    "torch, one tensor at a time": lambda parameters: AdamW(parameters, foreach=False),
    "torch, foreach": lambda parameters: AdamW(parameters, foreach=True),
    "torch, fused (adamw_torch)": lambda parameters: AdamW(parameters, fused=True),
    "DeepSpeed CPU Adam (deepspeed_cpu_adam)": lambda parameters: DeepSpeedCPUAdam(parameters),
}


def prepared(make: Make, size: int) -> Optimizer:
    """Return an optimizer over one tensor with a gradient, its states initialized by a first step."""
    parameter = nn.Parameter(torch.randn(size) * 0.02)
    parameter.grad = torch.randn(size) * 1e-3
    optimizer = make([parameter])
    optimizer.step()
    return optimizer


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    optimizers = {name: prepared(make, given.parameters) for name, make in KERNELS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in KERNELS}
    for _ in range(given.rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    print(f"{given.parameters:,} parameters, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| AdamW | ns per parameter |\n|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times) / given.parameters * 1e9:.2f} |")


if __name__ == "__main__":
    main()
