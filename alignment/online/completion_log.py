"""What of the policy's completions is written down: how they were scored, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment.online.completions import Generated
from alignment.online.ranking import Ranking
from alignment.reporting.completions import CompletionTable


class CompletionLog:
    """Prompts, two completions each, and what was found of them.

    Args:
        table: where they are written; None on ranks that write nothing.
        every: at every so many-th log; 0: never.
        prompts: of one table.
    """

    def __init__(self, table: CompletionTable | None, every: int, prompts: int) -> None:
        self.table, self.every, self.prompts = table if every else None, every, prompts
        self._logs = 0
        self._written: Mapping[str, Any] = {}  # by a run that kept the table, while this one does not
        self._rows: list[dict[str, Any]] = []

    def keep(self, groups: Sequence[Generated], rankings: Sequence[Ranking]) -> None:
        """Remember the first prompts of a window."""
        if self.table is not None:
            pairs = list(zip(groups, rankings, strict=True))[: self.prompts]
            self._rows = [_table_row(group, ranking) for group, ranking in pairs]

    def write(self, step: int) -> None:
        """Write what has been remembered since the last log, if this log's turn has come."""
        self._logs += 1
        # Not kept for the next log: a window that is left out has none, and another's would be taken for its own.
        rows, self._rows = self._rows, []
        if self.table is not None and rows and self._logs % self.every == 0:
            self.table.write(step, rows)

    def finish(self) -> None:
        """Write the rows that still wait for space, at the end of a run."""
        if self.table is not None:
            self.table.finish()

    def state_dict(self) -> dict[str, Any]:
        """How many logs there were, what is remembered, and how much of the file there is."""
        table = self._written if self.table is None else self.table.state_dict()
        return {"logs": self._logs, "rows": self._rows, "table": table}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._logs, self._rows = state["logs"], list(state["rows"])
        if self.table is None:
            self._written = state["table"]
        elif state["table"]:
            self.table.load_state_dict(state["table"])


def _table_row(group: Generated, ranking: Ranking) -> dict[str, Any]:
    """The pair that is trained on, the better completion first; of a dropped prompt its first two completions."""
    dropped = ranking.outcome if isinstance(ranking.outcome, str) else None
    first, second = (0, 1) if isinstance(ranking.outcome, str) else ranking.outcome
    scores = ranking.scores or [None] * len(group.texts)
    return {
        "prompt": group.source.prompt,
        "chosen": group.texts[first],
        "rejected": group.texts[second],
        "chosen_score": scores[first],
        "rejected_score": scores[second],
        "dropped": dropped,
    }
