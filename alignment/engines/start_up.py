"""What a run imports before anything else: the large libraries, without what no run of ours needs of them."""

from __future__ import annotations

from alignment.engines.garbage import uncollected
from alignment.internals.deepspeed import import_muon
from alignment.internals.transformers_start import import_model_index, import_trainer_utils


def import_libraries() -> None:
    """Import DeepSpeed and transformers' parts that import more than they use; calling it again changes nothing.

    The device has to be settled before, where it is not DeepSpeed's own choice.
    """
    with uncollected():
        import_muon()
        import_model_index()
        import_trainer_utils()
