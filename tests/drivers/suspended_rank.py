"""Rank 1 arrives and is suspended before it connects; rank 0 prints its error."""

from __future__ import annotations

import os
import signal
import time

from alignment.run import joining
from alignment.run.failures import JoinError
from alignment.run.ranks import rank

if __name__ == "__main__":
    store = joining._connect(30)
    if rank() == 1:
        store.add("arrived", 1)
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    pid, begun = int(store.get("pid")), time.monotonic()
    try:
        joining._meet(store, "gloo", 3)
    except JoinError as error:
        print(f"{error}; after {time.monotonic() - begun:.0f} s", flush=True)
    os.kill(pid, signal.SIGKILL)
    os._exit(0)
