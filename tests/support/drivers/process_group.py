"""Two ranks and the private sides of their process group: ``process_group.py WHAT``, one of the names below."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import deepspeed
import torch

from alignment.engines.launch_env import init_distributed
from alignment.internals.torch import default_store, set_group_timeout
from alignment.run.ranks import rank


def late(patience: int) -> None:
    """Rank 1 enters a collective 3 s late; rank 0 prints whether it waited."""
    set_group_timeout(timedelta(seconds=patience))
    if rank() == 1:
        time.sleep(3)
    try:
        torch.distributed.all_reduce(torch.zeros(1))
    except RuntimeError:
        print(f"rank {rank()} gave up", flush=True)
    else:
        print(f"rank {rank()} waited", flush=True)


def store() -> None:
    """Both use the group's store over separate connections, even after the group has been destroyed."""
    held = default_store()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = torch.distributed.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    torch.distributed.barrier()
    deepspeed.comm.destroy_process_group()
    own.set(f"from {rank()}", "a word")
    word = own.get(f"from {1 - rank()}").decode()
    if rank() == 0:  # may serve the other rank
        own.wait(["done"])
    else:
        own.set("done", "")
    del held
    print(f"rank {rank()} was given {word}", flush=True)


if __name__ == "__main__":
    init_distributed(use_cpu=True)
    torch.distributed.barrier()
    {"patient": lambda: late(60), "impatient": lambda: late(1), "store": store}[sys.argv[1]]()
