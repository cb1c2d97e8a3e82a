"""The command ``precompute``, killed some time after its reference was loaded: ``KILLED_AFTER`` seconds, 0 for never.

``PART_ROWS`` are the rows of a part of its stores.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from alignment.cli.precompute import main
from alignment.references import store
from alignment.references.engine import EngineReference, ReferencePlan

store.PART_ROWS = int(os.environ["PART_ROWS"])
SECONDS = float(os.environ["KILLED_AFTER"])
build, write = ReferencePlan.build, store.LogpStore.write


def built(plan: ReferencePlan, options: Any) -> EngineReference:
    """Build the reference, and start the timer on every rank."""
    reference = build(plan, options)
    if SECONDS:
        threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return reference


def written(one: store.LogpStore, *args: Any) -> None:
    """Write a part and pause, so that there is time for the kill."""
    write(one, *args)
    time.sleep(0.02 if SECONDS else 0)


if __name__ == "__main__":
    ReferencePlan.build = built  # type: ignore[method-assign]
    store.LogpStore.write = written  # type: ignore[method-assign]
    main()
