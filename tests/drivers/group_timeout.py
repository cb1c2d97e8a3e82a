"""One rank comes late to a collective: ``group_timeout.py WHEN``, before or after it the others' patience ends."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch

from alignment.engines.launch_env import init_distributed, rank
from alignment.internals.torch import set_group_timeout


def main() -> None:
    """Rank 1 comes 3 s late; rank 0 prints whether it waited."""
    init_distributed(use_cpu=True)
    torch.distributed.barrier()
    set_group_timeout(timedelta(seconds=1 if sys.argv[1] == "after" else 60))
    if rank() == 1:
        time.sleep(3)
    try:
        torch.distributed.all_reduce(torch.zeros(1))
    except RuntimeError:
        print(f"rank {rank()} gave up", flush=True)
    else:
        print(f"rank {rank()} waited", flush=True)


if __name__ == "__main__":
    main()
