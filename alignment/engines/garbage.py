"""Control over when Python's garbage collector runs, and which objects it scans."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within this context: imports create a million objects, nearly all of them live."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def old_objects_spared() -> Iterator[None]:
    """Exclude existing objects, mainly modules, from garbage collection within this context.

    DeepSpeed runs a collection for every engine that it creates, and transformers when continuous batching stops:
    0.3 s and more for each collection if both are loaded.
    """
    if gc.get_freeze_count():  # the caller has frozen objects
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
