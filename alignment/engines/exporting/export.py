"""One export for what a run leaves: adapters are merged into their base, full models written in another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.config.errors import OptionError
from alignment.engines.exporting.adapter import merge_adapter
from alignment.engines.exporting.model import export_model
from alignment.engines.exporting.report import MergeReport, ModelReport
from alignment.engines.exporting.source import is_adapter


def export(
    source: Path, out: Path, *, quantization: dict[str, Any] | None = None, **options: Any
) -> MergeReport | ModelReport:
    """Write ``out`` as a full model.

    Args:
        source: a checkpoint, an output folder, or any other folder of an adapter or a full model.
        out: a folder that does not exist or is empty.
        quantization: for an adapter alone, as for ``merge_adapter``.
        **options: as for ``merge_adapter`` and ``export_model``.

    Raises:
        OptionError: an option cannot be used, or not with a full model.
        OutputError: ``out`` is not empty or cannot be written.
        ModelError: the source or its base cannot be used.
        CheckpointError: a file of a checkpoint is not what was written.
        DataError: the dataset of the samples cannot be used.
    """
    if is_adapter(source):
        return merge_adapter(source, out, quantization=quantization, **options)
    if quantization is not None:
        bits = 4 if quantization.get("load_in_4bit") else 8
        raise OptionError(
            f"load_in_{bits}bit: {source} is a full model, and the option is for an adapter's base; leave it out"
        )
    return export_model(source, out, **options)
