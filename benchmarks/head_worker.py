"""Measure one implementation of log-probs and their gradients from hidden states, in a separate process.

python -m benchmarks.head_worker JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import memory_bytes

if TYPE_CHECKING:
    from torch import Tensor

OURS, KERNELS, TRL, TORCH, FULL = "ours", "ours, Triton kernels", "TRL", "linear_cross_entropy", "full logits"
_TRL_CHUNK = 32768  # vocabulary entries per chunk, as in TRL 1.16's trainers
_TRL_STATS = ("entropy", "mean_logits", "is_top1")


@dataclass(frozen=True)
class HeadJob:
    """A measurement: implementation, sizes of (tokens, width) states and (vocabulary, width) weight, and counts."""

    way: str
    tokens: int
    width: int
    vocabulary: int
    dtype: str
    device: str
    rounds: int
    threads: int


@dataclass(frozen=True)
class HeadResult:
    """Medians of wall and CPU time of both passes in seconds, memory in bytes, and the sum of the log-probs."""

    forward: float
    backward: float
    processor: float
    memory: int
    total: float


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """This project's head, with statistics."""
    from alignment.models.logprobs import token_logprobs

    return token_logprobs(hidden, weight, None, targets, stats=True)[0].sum()


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The fused head of TRL's trainers with the same statistics; on a CPU it uses torch's operations."""
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, _TRL_CHUNK, None, 1.0, _TRL_STATS)[0].sum()


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's chunked implementation: one sum instead of a value per token, and no statistics."""
    import torch
    from torch.nn import functional

    options = torch.nn.LinearCrossEntropyOptions()
    return -functional.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The full matrix of logits, and statistics from it."""
    import torch

    from alignment.models.logprobs import TokenStats

    logits = (hidden @ weight.t()).float()
    TokenStats.of_logits(logits, targets)
    return torch.log_softmax(logits, 1).gather(1, targets[:, None]).sum()


WAYS: dict[str, Callable[..., Any]] = {
    OURS: ours,
    KERNELS: ours,
    TRL: trl,
    TORCH: linear_cross_entropy,
    FULL: full_logits,
}


def measured(job: HeadJob) -> HeadResult:
    """Create the inputs, warm up once, and measure."""
    import torch

    torch.set_num_threads(job.threads)
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, job.dtype)
    # Without temporaries: memory that the allocator keeps for them would hide what an implementation allocates.
    hidden = torch.empty(job.tokens, job.width, dtype=dtype).normal_(generator=generator).to(job.device)
    weight = torch.empty(job.vocabulary, job.width, dtype=dtype).normal_(0, job.width**-0.5, generator=generator)
    weight = weight.to(job.device)
    targets = torch.randint(0, job.vocabulary, (job.tokens,), generator=generator).to(job.device)
    small = [tensor[:rows].clone().requires_grad_() for tensor, rows in ((hidden, 32), (weight, 600))]
    for tensor in (hidden.requires_grad_(), weight.requires_grad_()):
        tensor.grad = torch.ones_like(tensor)  # touched, so that the memory is resident
    way, on_gpu = WAYS[job.way], job.device != "cpu"
    way(*small, targets[:32] % 600).backward()  # triggers imports and compilation
    before = torch.cuda.memory_allocated() if on_gpu else memory_bytes("VmRSS")
    seconds: list[tuple[float, float, float]] = []
    total = 0.0
    for _ in range(job.rounds + 1):
        hidden.grad, weight.grad = None, None
        busy, times = time.process_time(), [_now(on_gpu)]
        result = way(hidden, weight, targets)
        times.append(_now(on_gpu))
        result.backward()
        times.append(_now(on_gpu))
        seconds.append((times[1] - times[0], times[2] - times[1], time.process_time() - busy))
        total = float(result)
    peak = torch.cuda.max_memory_allocated() if on_gpu else memory_bytes("VmHWM")
    medians = (statistics.median(column) for column in zip(*seconds[1:]))
    return HeadResult(*medians, max(0, peak - before), total)


def _now(on_gpu: bool) -> float:
    if on_gpu:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    given = HeadJob(**json.loads(job_file.read_text(encoding="utf-8")))
    os.environ["ALIGNMENT_HEAD_TILES"] = "triton" if given.way == KERNELS else "torch"
    result_file.write_text(json.dumps(asdict(measured(given))), encoding="utf-8")
