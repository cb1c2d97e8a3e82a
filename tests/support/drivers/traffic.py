"""Steps whose gradients are reduced once, on this many ranks; for ``test_gradient_traffic.py``.

Usage: traffic.py FOLDER. ``RANKS.pt`` in it has for each case what the masters changed by in each step, and how many
reductions every micro-batch made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed import comm
from support.fragment_runs import LAYERS, Case, engine, masters, one_row
from support.helpers import zero
from torch import Tensor

from alignment.cli.guarded import guarded
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import PolicyEngine
from alignment.run.ranks import rank, world_size

# The last ones partition gradients in another order, and sum them in another format than they compute in.
CASES = (
    "stage1/fp32/sgd",
    "stage2/fp32/sgd",
    "stage2-offload/fp32/sgd",
    "stage2-round-robin/fp32/sgd",
    "stage2-offload-round-robin/fp32/sgd",
    "stage2-fp32-accumulation/bf16/sgd",
    "stage2-offload-fp32-accumulation/bf16/sgd",
)
LAYERS["stage2-offload-round-robin"] = zero(2, optimizer=True)  # zero2_offload.json on several ranks
LAYERS["stage2-offload-round-robin"]["zero_optimization"]["round_robin_gradients"] = True
MICRO_BATCHES = 6  # of a window, over all ranks; one window has but one on each
# An expert that no token goes through: not in the last micro-batch of the first rank, nor in any of the second one.
IDLE = {2, 3, 4, 5}
# Sums in 16 bits forget the second micro-batch; the third one is the first again.
WEIGHTS = (256.0, 1.0, -256.0, 1.0, 1.0, 1.0)
PLAIN = (1.0,) * MICRO_BATCHES


def passed(policy: PolicyEngine, numbers: list[int], idle: set[int], weights: tuple[float, ...]) -> Iterator[int]:
    """Run backward passes of these micro-batches; return the number of reductions of each."""
    mlp = policy.scorer.model.model.layers[1].mlp
    forward = mlp.forward
    for place, number in enumerate(numbers):
        mlp.forward = torch.zeros_like if number in idle else forward
        loss = policy.forward(one_row(0 if number == 2 else number)).scores.sum() * weights[number] / 18
        with (
            mock.patch.object(comm, "all_reduce", wraps=comm.all_reduce) as reduced,
            mock.patch.object(comm, "reduce", wraps=comm.reduce) as to_one,
        ):
            policy.backward(loss, last=place == len(numbers) - 1)
        yield reduced.call_count + to_one.call_count
    mlp.forward = forward


def share(count: int) -> list[int]:
    """This rank's micro-batches: one after the other."""
    each = count // world_size()
    return list(range(rank() * each, (rank() + 1) * each))


def steps(case: str, folder: Path, once: bool) -> dict[str, Any]:
    """An idle expert, weights that cancel, one micro-batch on each rank, an expert that is idle in all of them; then a
    window that is given up."""
    policy = engine(Case.of(case), folder, reduce_once=once)
    found: dict[str, Any] = {"calls": [], "updates": [], "norms": []}
    for count, idle, weights in (
        (MICRO_BATCHES, IDLE, PLAIN),
        (MICRO_BATCHES, set[int](), WEIGHTS),
        (2, set[int](), PLAIN),
        (MICRO_BATCHES, set(range(MICRO_BATCHES)), PLAIN),
    ):
        before: dict[str, Tensor] = masters(policy)
        found["calls"].append(list(passed(policy, share(count), idle, weights)))
        found["norms"].append(policy.step())
        found["updates"].append({name: after - before[name] for name, after in masters(policy).items()})
    before = masters(policy)
    if once:
        for _ in passed(policy, share(MICRO_BATCHES), set(), WEIGHTS):
            break  # the window is abandoned after its first micro-batch
        policy.discard()
        found["discarded"] = all(torch.equal(after, before[name]) for name, after in masters(policy).items())
        list(passed(policy, share(2), set(), WEIGHTS))
        found["norms"].append(policy.step())
    policy.close()
    return found


def main() -> None:
    """Run every case."""
    folder = Path(sys.argv[1])
    init_distributed(use_cpu=True)
    results = {case: steps(case, folder, once=world_size() > 1) for case in CASES}
    if rank() == 0:
        torch.save(results, folder / f"{world_size()}.pt")


if __name__ == "__main__":
    sys.exit(guarded(main))
