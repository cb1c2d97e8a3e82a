"""The data report: how many rows were kept, dropped (by reason) and truncated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from datasets import Dataset

from alignment.config.errors import counted

NOT_DRAWN = "not sampled (proportions of the mixture)"


@dataclass(frozen=True)
class DataReport:
    """Counts for one prepared dataset, in rows as the method sees them (a pair counts as two rows for KTO).

    ``rows_in == rows_out + sum(dropped.values())``; all other counts are of the kept rows. Only labeled rows are
    ``desirable`` or ``undesirable``. With packing, ``pack_left_out`` sequences without loss tokens are omitted.
    """

    rows_in: int
    rows_out: int
    dropped: dict[str, int] = field(default_factory=dict)
    prompts_cut: int = 0
    completions_cut: int = 0
    desirable: int = 0
    undesirable: int = 0
    packs: int = 0
    pack_length: int = 0
    pack_tokens: int = 0
    pack_left_out: int = 0

    def summary(self) -> str:
        """Return a one-line summary for the terminal and the log."""
        labels = f" ({self.desirable} desirable, {self.undesirable} undesirable)"
        parts = [f"{self.rows_out} of {self.rows_in} rows kept{labels if self.desirable + self.undesirable else ''}"]
        if self.dropped:
            parts.append(f"{sum(self.dropped.values())} dropped: {self.drops()}")
        parts.append(f"{self.prompts_cut} prompts and {self.completions_cut} completions truncated")
        if self.packs:
            full = self.pack_tokens / (self.packs * self.pack_length)
            parts.append(f"{counted(self.packs, 'pack')} of up to {self.pack_length} tokens, {full:.0%} full")
        if self.pack_left_out:
            parts.append(f"{self.pack_left_out} sequences without completion tokens omitted")
        return ", ".join(parts)

    def drops(self) -> str:
        """Return the reasons for dropped rows with their counts, most frequent first."""
        ordered = sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        return "; ".join(f"{count} × {reason}" for reason, count in ordered)


def counts(rows: Dataset) -> dict[str, int]:
    """Return what a report counts in tokenized rows."""
    labels = rows["label"][:] if "label" in rows.column_names else []
    cut = {"prompts_cut": sum(rows["prompt_cut"][:]), "completions_cut": sum(rows["completions_cut"][:])}
    return {"rows_out": len(rows), **cut, "desirable": sum(labels), "undesirable": len(labels) - sum(labels)}


def joined(reports: Sequence[DataReport]) -> DataReport:
    """Combine the reports of several datasets."""
    dropped = sum((Counter(report.dropped) for report in reports), Counter[str]())
    names = ("rows_in", "rows_out", "prompts_cut", "completions_cut", "desirable", "undesirable")
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return DataReport(dropped=dict(sorted(dropped.items())), **sums)
