"""The report of an export, for people and as a file, and the advice that follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from alignment.engines.export_check import TOLERATED, OutputChange
from alignment.models.adapters.survival import Survival


@dataclass(frozen=True)
class MergeReport:
    """What an export did.

    Attributes:
        adapter: its folder.
        base_model: folder or hub name.
        task: ``causal_lm`` or ``classifier``.
        dtype: of the exported weights, by torch's name.
        dequantized: how the weights were quantised that were merged as dequantised ones; None where they were not.
        tensors: how many tensors the adapter changed.
        survival: what rounding to ``dtype`` left of the update, over all tensors.
        worst: the same for the tensor with the smallest cosine; None where nothing changed.
        change: of log-probs or rewards on sample rows; None where that was left out.
        advice: what to do about it; None where nothing has to be done.
    """

    adapter: str
    base_model: str
    task: str
    dtype: str
    dequantized: str | None
    tensors: int
    survival: Survival
    worst: Survival | None
    change: OutputChange | None
    advice: str | None

    def lines(self) -> Iterator[str]:
        """For people."""
        left = self.survival
        yield (
            f"{self.tensors} tensors changed, by {left.update:.2g} of their size; of the update {self.dtype} keeps a "
            f"cosine of {left.cosine:.4f} and {left.norm_ratio:.4f} of the norm"
        )
        if self.worst is not None and self.worst.cosine < 0.999:
            yield f"least of {self.worst.name}: cosine {self.worst.cosine:.4f}, norm {self.worst.norm_ratio:.4f}"
        if self.change is not None:
            made, share = self.change, f"{self.change.share:.2%} of"
            yield (
                f"{made.what} on {made.rows} rows ({made.source}): the export differs from the adapter on its base by "
                f"{made.error_mean:.2g} on average and {made.error_max:.2g} at most; the mean is {share} what "
                f"training changed ({made.effect_mean:.2g})"
            )
        if self.advice is not None:
            yield self.advice

    def json(self) -> str:
        """For programs: the fields, and the share of the change."""
        fields = asdict(self)
        if self.change is not None:
            fields["change"]["share"] = self.change.share if math.isfinite(self.change.share) else None
        return json.dumps(fields, indent=2) + "\n"


def advice(change: OutputChange | None, dtype: str) -> str | None:
    """What to do about an export in ``dtype`` (torch's name) that changes outputs too much; None where it does not."""
    if change is None or change.share <= TOLERATED:
        return None
    lost = (
        f"by {change.share:.0%} of what training changed" if change.effect_mean else "though training changed nothing"
    )
    if dtype == "float32":
        return f"advice: the export changes the {change.what} {lost}, in fp32 too; keep the adapter"
    return (
        f"advice: rounding to {dtype} changes the {change.what} {lost} (more than {TOLERATED:.0%}); export with "
        "--dtype float32, or keep the adapter"
    )
