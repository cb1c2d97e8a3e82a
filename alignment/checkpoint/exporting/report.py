"""The report of an export, as text and as a file, and the advice that follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from alignment.checkpoint.exporting.check import TOLERATED, OutputChange
from alignment.models.adapters.survival import Survival
from alignment.reporting.model_card import public


@dataclass(frozen=True)
class MergeReport:
    """Result of exporting an adapter.

    Attributes:
        source: name of its folder.
        base_model: folder or Hub name of the base.
        task: ``causal_lm`` or ``classifier``.
        dtype: dtype of the exported weights, by torch's name.
        dequantized: quantization of the base whose dequantized weights were merged; None if it was not quantized.
        tensors: number of tensors that the adapter changed.
        survival: how much of the update survives rounding to ``dtype``, over all tensors.
        worst: the same for the tensor with the smallest cosine; None if nothing changed.
        masters: number of the adapter's tensors that were taken from the fp32 master weights.
        change: change of log-probs or rewards on sample rows; None if not compared.
        advice: what to do about it; None if nothing.
    """

    source: str
    base_model: str
    task: str
    dtype: str
    dequantized: str | None
    tensors: int
    survival: Survival
    worst: Survival | None
    masters: int
    change: OutputChange | None
    advice: str | None

    def lines(self) -> Iterator[str]:
        """The report as lines of text."""
        left = self.survival
        yield (
            f"{self.tensors} tensors changed by a relative norm of {left.update:.2g}; after rounding to {self.dtype}, "
            f"the update has a cosine of {left.cosine:.4f} and {left.norm_ratio:.4f} of its norm"
        )
        yield from _worst(self.worst)
        if self.masters:
            yield f"merged the adapter's fp32 master weights ({self.masters} tensors) instead of its 16-bit weights"
        if self.change is not None:
            yield _changed(self.change, "the export differs from the adapter on its base")
        if self.advice is not None:
            yield self.advice

    def json(self) -> str:
        """The report as JSON: the fields, and the relative change."""
        return _json(self)


@dataclass(frozen=True)
class ModelReport:
    """Result of exporting a full model.

    Attributes:
        source: name of its folder.
        base_model: folder or Hub name of the model before training; None if unknown or not available.
        task: ``causal_lm`` or ``classifier``.
        stored: dtype of the source's model files, by torch's name.
        dtype: dtype of the exported weights.
        masters: number of tensors that were taken from the fp32 master weights.
        survival: how much of the update since the base survives rounding to 16 bits: in this export, or in the model
            files whose weights an export in fp32 replaces by the master weights. None if nothing is rounded, or the
            base is not available.
        worst: the same for the tensor with the smallest cosine.
        change: change of log-probs or rewards between the source and the reloaded export; None if not compared.
        stored_change: the same between the master weights and the model files; None if one of them is missing.
        advice: what to do about it; None if nothing.
    """

    source: str
    base_model: str | None
    task: str
    stored: str
    dtype: str
    masters: int
    survival: Survival | None
    worst: Survival | None
    change: OutputChange | None
    stored_change: OutputChange | None
    advice: str | None

    @property
    def weights(self) -> str:
        """Which weights were exported, as text."""
        if self.masters:
            return f"the fp32 master weights of {self.masters} tensors instead of the {self.stored} model files"
        return f"the {self.stored} weights of the model files"

    def lines(self) -> Iterator[str]:
        """The report as lines of text."""
        yield f"exported in {self.dtype}: {self.weights}"
        if self.dtype == "float32" != self.stored and not self.masters:
            yield f"the folder has no fp32 master weights, so {self.dtype} has no advantage over {self.stored} here"
        if self.survival is not None:
            left, rounded = self.survival, self.stored if self.masters else self.dtype
            yield (
                f"training changed the weights by a relative norm of {left.update:.2g}; after rounding to {rounded}, "
                f"the update has a cosine of {left.cosine:.4f} and {left.norm_ratio:.4f} of its norm"
            )
        yield from _worst(self.worst)
        if self.stored_change is not None:
            yield _changed(self.stored_change, f"the {self.stored} model files differ from the master weights")
        if self.change is not None:
            yield _changed(self.change, "the reloaded export differs from its source")
        if self.advice is not None:
            yield self.advice

    def json(self) -> str:
        """The report as JSON: the fields, and the relative changes."""
        return _json(self)


def _worst(worst: Survival | None) -> Iterator[str]:
    if worst is not None and worst.cosine < 0.999:
        yield f"worst tensor, {worst.name}: cosine {worst.cosine:.4f}, norm {worst.norm_ratio:.4f}"


def _changed(made: OutputChange, differs: str) -> str:
    line = (
        f"{made.what} on {made.rows} rows ({made.source}): {differs} by {made.error_mean:.2g} on average and "
        f"{made.error_max:.2g} at most"
    )
    if made.share is None:
        return line
    return f"{line}; the mean is {made.share:.2%} of the change by training ({made.effect_mean:.2g})"


def _json(report: MergeReport | ModelReport) -> str:
    """The fields as JSON. It is published with the model, so local paths are reduced to their last part."""
    fields: dict[str, Any] = asdict(report)
    fields["base_model"] = public(report.base_model)
    for name, value in vars(report).items():
        if isinstance(value, OutputChange):
            fields[name]["source"] = public(value.source)
            fields[name]["share"] = value.share if value.share is not None and math.isfinite(value.share) else None
    return json.dumps(fields, indent=2) + "\n"


def advice(change: OutputChange | None, dtype: str, keep: str = "keep the adapter") -> str | None:
    """Advice on an export in ``dtype`` (torch's name) that changes outputs too much; None if it does not.

    ``keep`` is the advice if a wider dtype does not help.
    """
    if change is None or change.share is None or change.share <= TOLERATED:
        return None
    lost = (
        f"by {change.share:.0%} of the change by training" if change.effect_mean else "though training changed nothing"
    )
    if dtype == "float32":
        return f"advice: the export changes the {change.what} {lost}, even in fp32; {keep}"
    return (
        f"advice: rounding to {dtype} changes the {change.what} {lost} (more than {TOLERATED:.0%}); export with "
        f"--dtype float32, or {keep}"
    )
