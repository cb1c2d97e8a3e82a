"""Under the guard, rank 1 fails in the requested way while rank 0 does something else.

Usage: failing_rank.py KIND WORK, after an optional --local_rank=N as the `deepspeed` launcher adds it.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import time

from alignment.cli import guarded as guard
from alignment.cli.guarded import guarded
from alignment.config.errors import DataError
from alignment.run.ranks import rank, world_size


def fail(kind: str) -> None:
    """Raise what `kind` names."""
    if kind == "data":
        raise DataError("train.jsonl, line 3: 'label' is 'yes': set true or false")
    if kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/model.safetensors")
    if kind == "defect":
        raise RuntimeError("tensor shapes differ")
    if kind == "interrupted":
        raise KeyboardInterrupt


def main() -> None:
    """Rank 1 (or with `everyone-…` each rank) fails; the others work until they are ended."""
    import torch

    kind, work = sys.argv[-2:]
    print(f"rank {rank()} of {world_size()} began", flush=True)
    if kind.startswith("everyone-"):
        torch.distributed.barrier()  # a connecting rank is not notified before torch retries
        fail(kind.removeprefix("everyone-"))
    if kind == "killed":
        first = [os.getpid()]
        torch.distributed.broadcast_object_list(first)
        time.sleep(1.2)  # the ranks have heard of each other
        if rank() == 1:
            os.kill(first[0], signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
    elif rank() == 1 and kind != "none":
        time.sleep(0.5)
        fail(kind)
    if work == "collective":
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        print(f"sum {total.item():g}", flush=True)
    elif work == "sleep":
        for _ in range(600):
            time.sleep(0.1)
            print("still sleeping", file=sys.stderr, flush=True)
    elif work == "uneven":
        guard._LEAVE_S = 0.5  # the exit hook of a tracker takes longer than leaving the process group may
        atexit.register(lambda: (time.sleep(2.0), print(f"rank {rank()} has uploaded", flush=True)))
        time.sleep(2.0 * rank())


if __name__ == "__main__":
    sys.exit(guarded(main, use_cpu=True))
