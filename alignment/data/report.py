"""What became of the rows: kept, dropped by reason, cut."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

NOT_DRAWN = "not drawn (the weights of dataset_mixture)"


@dataclass(frozen=True)
class DataReport:
    """Counts of one prepared dataset, in rows as the method sees them (a pair given to KTO counts as two).

    ``rows_in == rows_out + sum(dropped.values())``. ``prompts_cut`` and ``completions_cut`` count within the kept
    rows, in a mixture before some of them were drawn; ``desirable`` and ``undesirable`` are 0 for rows without label.
    ``packs`` is 0 where rows are not packed; else of at most ``pack_length`` tokens each, ``pack_tokens`` in all, and
    without ``pack_left_out`` sequences of which nothing is learned.
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
        """One line for the terminal and the log."""
        labels = f" ({self.desirable} desirable, {self.undesirable} undesirable)"
        parts = [f"{self.rows_out} of {self.rows_in} rows kept{labels if self.desirable + self.undesirable else ''}"]
        if self.dropped:
            parts.append(f"{sum(self.dropped.values())} dropped: {self.drops()}")
        parts.append(f"{self.prompts_cut} prompts and {self.completions_cut} completions cut to length")
        if self.packs:
            parts.append(self._packed())
        return ", ".join(parts)

    def _packed(self) -> str:
        full = self.pack_tokens / (self.packs * self.pack_length)
        without = f", without {self.pack_left_out} sequences of prompts alone" if self.pack_left_out else ""
        packs = f"{self.packs} pack{'s' if self.packs > 1 else ''}"
        return f"{packs} of up to {self.pack_length} tokens, {full:.0%} full{without}"

    def drops(self) -> str:
        """The reasons for dropped rows with their counts, most frequent first."""
        ordered = sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        return "; ".join(f"{count} × {reason}" for reason, count in ordered)

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DataReport:
        """Read what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def drawn(self, rows: int, desirable: int) -> DataReport:
        """The report after only ``rows`` of the kept rows were taken into a mixture, ``desirable`` of them so."""
        if rows == self.rows_out:
            return self
        labelled = bool(self.desirable + self.undesirable)
        return replace(
            self,
            rows_out=rows,
            dropped={**self.dropped, NOT_DRAWN: self.rows_out - rows},
            desirable=desirable if labelled else 0,
            undesirable=rows - desirable if labelled else 0,
        )


def joined(reports: Sequence[DataReport]) -> DataReport:
    """The report of several datasets that became one."""
    dropped: Counter[str] = Counter()
    for report in reports:
        dropped.update(report.dropped)
    names = ("rows_in", "rows_out", "prompts_cut", "completions_cut", "desirable", "undesirable")
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return DataReport(dropped=dict(sorted(dropped.items())), **sums)
