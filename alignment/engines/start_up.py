"""Fast starts: large libraries without the parts that no run uses, and fewer scans by the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from alignment.internals.deepspeed import import_muon
from alignment.internals.transformers_start import import_model_index, import_trainer_utils


def import_libraries() -> None:
    """Import DeepSpeed, which chooses the device if that is not done yet, and transformers without unused parts."""
    import_muon()
    import_model_index()
    import_trainer_utils()


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
