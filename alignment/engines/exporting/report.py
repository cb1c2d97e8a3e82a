"""The report of an export, for people and as a file, and the advice that follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from alignment.engines.exporting.check import TOLERATED, OutputChange
from alignment.models.adapters.survival import Survival
from alignment.reporting.model_card import public


@dataclass(frozen=True)
class MergeReport:
    """What the export of an adapter did.

    Attributes:
        source: the name of its folder.
        base_model: folder or hub name.
        task: ``causal_lm`` or ``classifier``.
        dtype: of the exported weights, by torch's name.
        dequantized: how the weights were quantised that were merged as dequantised ones; None where they were not.
        tensors: how many tensors the adapter changed.
        survival: what rounding to ``dtype`` left of the update, over all tensors.
        worst: the same for the tensor with the smallest cosine; None where nothing changed.
        masters: how many of the adapter's tensors were taken from the fp32 master weights.
        change: of log-probs or rewards on sample rows; None where that was left out.
        advice: what to do about it; None where nothing has to be done.
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
        """For people."""
        left = self.survival
        yield (
            f"{self.tensors} tensors changed, by {left.update:.2g} of their size; of the update {self.dtype} keeps a "
            f"cosine of {left.cosine:.4f} and {left.norm_ratio:.4f} of the norm"
        )
        yield from _worst(self.worst)
        if self.masters:
            yield f"the adapter's fp32 master weights were merged ({self.masters} tensors), not its 16-bit ones"
        if self.change is not None:
            yield _changed(self.change, "the export differs from the adapter on its base")
        if self.advice is not None:
            yield self.advice

    def json(self) -> str:
        """For programs: the fields, and the share of the change."""
        return _json(self)


@dataclass(frozen=True)
class ModelReport:
    """What the export of a full model did.

    Attributes:
        source: the name of its folder.
        base_model: folder or hub name of the model before training; None where it is unknown or not there.
        task: ``causal_lm`` or ``classifier``.
        stored: dtype of the source's model files, by torch's name.
        dtype: of the exported weights.
        masters: how many tensors were taken from the fp32 master weights.
        survival: of the update since the base, what its rounding to 16 bits leaves: by this export, or in the model
            files in the place of which an export in fp32 takes the master weights. None where nothing is rounded, or
            the base is not there.
        worst: the same for the tensor with the smallest cosine.
        change: of log-probs or rewards between the source and the export, read again; None where that was left out.
        stored_change: the same between the master weights and the model files; None where these are not both there.
        advice: what to do about it; None where nothing has to be done.
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
        """Which weights were exported, in words."""
        if self.masters:
            return f"the fp32 master weights of {self.masters} tensors, not the {self.stored} ones of the model files"
        return f"the {self.stored} weights of the model files"

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"exported in {self.dtype}: {self.weights}"
        if self.dtype == "float32" != self.stored and not self.masters:
            yield f"the folder has no fp32 master weights: {self.dtype} gains nothing over {self.stored} here"
        if self.survival is not None:
            left, rounded = self.survival, self.stored if self.masters else self.dtype
            yield (
                f"training changed the weights by {left.update:.2g} of their size; of this update {rounded} keeps a "
                f"cosine of {left.cosine:.4f} and {left.norm_ratio:.4f} of the norm"
            )
        yield from _worst(self.worst)
        if self.stored_change is not None:
            yield _changed(self.stored_change, f"the {self.stored} model files differ from the master weights")
        if self.change is not None:
            yield _changed(self.change, "the export, read again, differs from its source")
        if self.advice is not None:
            yield self.advice

    def json(self) -> str:
        """For programs: the fields, and the shares of the changes."""
        return _json(self)


def _worst(worst: Survival | None) -> Iterator[str]:
    if worst is not None and worst.cosine < 0.999:
        yield f"least of {worst.name}: cosine {worst.cosine:.4f}, norm {worst.norm_ratio:.4f}"


def _changed(made: OutputChange, differs: str) -> str:
    line = (
        f"{made.what} on {made.rows} rows ({made.source}): {differs} by {made.error_mean:.2g} on average and "
        f"{made.error_max:.2g} at most"
    )
    if made.share is None:
        return line
    return f"{line}; the mean is {made.share:.2%} of what training changed ({made.effect_mean:.2g})"


def _json(report: MergeReport | ModelReport) -> str:
    """It lies beside the model and is published with it, so of paths on this machine the last part is left."""
    fields: dict[str, Any] = asdict(report)
    fields["base_model"] = public(report.base_model)
    for name, value in vars(report).items():
        if isinstance(value, OutputChange):
            fields[name]["source"] = public(value.source)
            fields[name]["share"] = value.share if value.share is not None and math.isfinite(value.share) else None
    return json.dumps(fields, indent=2) + "\n"


def advice(change: OutputChange | None, dtype: str, keep: str = "keep the adapter") -> str | None:
    """What to do about an export in ``dtype`` (torch's name) that changes outputs too much; None where it does not.

    ``keep`` is what to do where a wider dtype does not help.
    """
    if change is None or change.share is None or change.share <= TOLERATED:
        return None
    lost = (
        f"by {change.share:.0%} of what training changed" if change.effect_mean else "though training changed nothing"
    )
    if dtype == "float32":
        return f"advice: the export changes the {change.what} {lost}, in fp32 too; {keep}"
    return (
        f"advice: rounding to {dtype} changes the {change.what} {lost} (more than {TOLERATED:.0%}); export with "
        f"--dtype float32, or {keep}"
    )
