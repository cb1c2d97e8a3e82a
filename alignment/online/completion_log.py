"""Log the policy's completions with their scores and outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment.online.completions import Generated
from alignment.online.ranking import Ranking
from alignment.reporting.log import CompletionTable


class CompletionLog:
    """Collect prompts with two completions each and their rankings, and write them as a table.

    Args:
        table: the destination.
        every: write a table every ``every`` logs; 0 disables it.
        prompts: number of prompts per table.
    """

    def __init__(self, table: CompletionTable, every: int, prompts: int) -> None:
        self.table, self.every, self.prompts = table, every, prompts
        self._logs = 0
        self._rows: list[dict[str, Any]] = []

    def keep(self, groups: Sequence[Generated], rankings: Sequence[Ranking]) -> None:
        """Store the first prompts of a window."""
        pairs = list(zip(groups, rankings, strict=True))[: self.prompts]
        self._rows = [_table_row(group, ranking) for group, ranking in pairs]

    def write(self, step: int) -> None:
        """Write the prompts stored since the last log, if a table is due."""
        self._logs += 1
        # Cleared even if not written: an omitted window has none, and must not be logged with those of another window.
        rows, self._rows = self._rows, []
        if self.every and self._logs % self.every == 0:
            self.table.write_table(step, rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of logs, the stored prompts and the length of the file."""
        return {"logs": self._logs, "rows": self._rows, "table": self.table.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._logs, self._rows = state["logs"], list(state["rows"])
        if state["table"]:  # empty in the state of an older run without tables
            self.table.load_state_dict(state["table"])


def _table_row(group: Generated, ranking: Ranking) -> dict[str, Any]:
    """Return the training pair, the better completion first; for a dropped prompt, its first two completions."""
    first, second = (0, 1) if isinstance(ranking.outcome, str) else ranking.outcome
    scores = ranking.scores or [None] * len(group.texts)
    return {
        "prompt": group.source.prompt,
        "chosen": group.texts[first],
        "rejected": group.texts[second],
        "chosen_score": scores[first],
        "rejected_score": scores[second],
        "dropped": ranking.outcome if isinstance(ranking.outcome, str) else None,
    }
