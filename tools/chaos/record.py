"""Record the result of every attempt as a line in a file, so that the command can be interrupted and continued."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.chaos.run import Attempted, as_json

_CLOSED = "closed"


class Record:
    """The attempts of a seed, in a file that may also contain other seeds. Unfinished chains are ignored and repeated.

    Args:
        file: the file to append to; created at the first attempt.
        seed: seed of the plan.
    """

    def __init__(self, file: Path, seed: int) -> None:
        self.file, self.seed = file, seed
        self.attempts: list[dict[str, Any]] = []
        self.closed: set[str] = set()
        open_chains: dict[str, list[dict[str, Any]]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            if not line.endswith("}"):  # incomplete line
                continue
            entry = json.loads(line)
            if entry["seed"] != seed:
                continue
            if _CLOSED in entry:
                self.closed.add(entry[_CLOSED])
                self.attempts += open_chains.pop(entry[_CLOSED], [])
            elif entry["number"] == 1:
                open_chains[entry["chain"]] = [entry]
            else:
                open_chains.setdefault(entry["chain"], []).append(entry)

    def add(self, attempted: Attempted) -> None:
        """Append an attempt."""
        self._write(as_json(attempted))

    def close(self, chain: str, attempts: Iterable[Attempted]) -> None:
        """Mark a chain as finished."""
        self._write({_CLOSED: chain})
        self.closed.add(chain)
        self.attempts += [as_json(attempted) for attempted in attempts]

    def _write(self, entry: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = self.file.read_bytes() if self.file.exists() else b""
        with self.file.open("a") as file:
            file.write("\n" * (not text.endswith(b"\n") and bool(text)))  # after an incomplete line
            file.write(json.dumps({"seed": self.seed, **entry}) + "\n")

    @property
    def kills(self) -> int:
        """Number of kills that happened."""
        return sum(attempt["killed"] for attempt in self.attempts)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Attempts with problems."""
        return [attempt for attempt in self.attempts if attempt["problems"]]

    def summary(self) -> list[str]:
        """Return lines with kills by phase and method, restarts, time, and every failure with its replay options."""
        killed = [attempt for attempt in self.attempts if attempt["killed"]]
        resumed = [attempt for attempt in self.attempts if attempt["resumed_from"]]
        seconds = sum(attempt["seconds"] for attempt in self.attempts)
        methods = ", ".join(f"{count} of {name}" for name, count in _counted(killed, "method"))
        lines = [
            f"{len(killed)} kills ({methods or 'none'}) in {len(self.closed)} runs, {len(self.attempts)} starts, "
            f"{len(resumed)} of them from a checkpoint; {seconds / 60:.0f} min, "
            f"{seconds / max(1, len(killed)):.1f} s for each kill",
            "by phase: " + ", ".join(f"{name} {count}" for name, count in _counted(killed, "place")),
        ]
        lines += [f"  {count:5} {name}" for name, count in _counted(killed, "point")]
        lines.append(f"{len(self.failures)} failures")
        for failure in self.failures:
            lines.append(
                f"  chain {failure['chain']} ({failure['method']}), start {failure['number']}, {failure['kill']}: "
                f"{'; '.join(failure['problems'])}; replay: --seed {self.seed} --replay {failure['chain']}"
            )
        return lines


def _counted(attempts: Iterable[dict[str, Any]], key: str) -> list[tuple[str, int]]:
    return Counter(attempt[key] for attempt in attempts).most_common()
