"""What a run imports before anything else: the large libraries, without what no run of ours needs of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from alignment.internals.deepspeed import import_muon
from alignment.internals.transformers_start import import_model_index, import_trainer_utils


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


def import_libraries() -> None:
    """Import DeepSpeed and transformers' parts that import more than they use; calling it again changes nothing.

    The device has to be settled before, where it is not DeepSpeed's own choice.
    """
    with uncollected():
        import_muon()
        import_model_index()
        import_trainer_utils()
