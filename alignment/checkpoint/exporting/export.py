"""Export of a run's result: adapters are merged into their base, full models are written in another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.checkpoint.exporting.adapter import merge_adapter
from alignment.checkpoint.exporting.model import export_model
from alignment.checkpoint.exporting.report import MergeReport, ModelReport
from alignment.checkpoint.exporting.source import is_adapter
from alignment.config.errors import OptionError


def export(
    source: Path, out: Path, *, quantization: dict[str, Any] | None = None, **options: Any
) -> MergeReport | ModelReport:
    """Write a full model to ``out``.

    Args:
        source: a checkpoint, an output folder, or any other folder of an adapter or a full model.
        out: a folder that does not exist or is empty.
        quantization: for adapters only, as for ``merge_adapter``.
        **options: as for ``merge_adapter`` and ``export_model``.

    Raises:
        OptionError: an option is invalid, or not applicable to a full model.
        OutputError: ``out`` is not empty or cannot be written.
        ModelError: the source or its base cannot be used.
        CheckpointError: a file of a checkpoint has changed since it was written.
        DataError: the dataset of the samples cannot be used.
    """
    if is_adapter(source):
        return merge_adapter(source, out, quantization=quantization, **options)
    if quantization is not None:
        bits = 4 if quantization.get("load_in_4bit") else 8
        raise OptionError(
            f"load_in_{bits}bit: the option applies to an adapter's base, but {source} is a full model; remove it"
        )
    return export_model(source, out, **options)
