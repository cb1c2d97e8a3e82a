"""The large libraries that a run imports first, without their parts that no run uses."""

from __future__ import annotations

from alignment.internals.deepspeed import import_muon
from alignment.internals.transformers_start import import_model_index, import_trainer_utils


def import_libraries() -> None:
    """Import DeepSpeed, which chooses the device if that is not done yet, and transformers without unused parts."""
    import_muon()
    import_model_index()
    import_trainer_utils()
