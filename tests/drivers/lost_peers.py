"""torch's errors when another rank is lost, each as one line of ``describe``. Usage: lost_peers.py CASE.

It runs without the guard, which would end the rank first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from alignment.engines.launch_env import init_distributed
from alignment.internals.torch import default_store
from alignment.run.failures import describe, is_lost_peer
from alignment.run.ranks import rank


def tell(name: str, call: Callable[[], Any]) -> None:
    """Print the exception of a call."""
    try:
        call()
        print(f"{name}: nothing", flush=True)
    except Exception as error:
        line, is_defect = describe(error)
        print(f"{name}: {type(error).__name__} lost={is_lost_peer(error)} defect={is_defect} {line}", flush=True)


def killed(store: Any) -> None:
    """Rank 1 is killed while rank 0 waits for it."""
    if rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    tell("all_reduce", lambda: dist.all_reduce(torch.ones(4)))
    tell("gather_object", lambda: dist.all_gather_object([None, None], {"rank": 0}))


def store_killed(store: Any) -> None:
    """Rank 0, which serves the store, is killed."""
    if rank() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    tell("all_reduce", lambda: dist.all_reduce(torch.ones(4)))
    tell("add", lambda: store.add("n", 1))


if __name__ == "__main__":
    init_distributed(use_cpu=True)
    dist.all_reduce(torch.ones(1))
    globals()[sys.argv[-1]](default_store())
    os._exit(0)
