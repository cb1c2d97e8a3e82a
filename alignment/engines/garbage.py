"""When Python's garbage collector runs, and what it looks through."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within this context no garbage is looked for: imports make a million objects, and next to none of it is any."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def old_objects_spared() -> Iterator[None]:
    """Within this context what was there before is not looked through: modules, above all.

    DeepSpeed collects with every engine that it makes, and transformers when continuous batching stops: 0.3 s and more
    for each collection where both are loaded.
    """
    if gc.get_freeze_count():  # someone's own
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
