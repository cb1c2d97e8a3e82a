"""Combine the results of both sides into ratios, a verdict and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.jobs import METHODS, Floor, Setting
from benchmarks.worker import Result

_MIB = 2**20
ALIKE = 1e-4
# For 16-bit training; without a rollout, a step's metrics depend on the rows' lengths far more than this.
ALIKE_16 = 3e-2


@dataclass(frozen=True)
class Comparison:
    """This project compared with TRL: medians over the measured steps of all repeats; ratios are TRL / ours, per step.

    Attributes:
        method: a key of :data:`benchmarks.jobs.METHODS`.
        setting: how both sides ran.
        ours, theirs: seconds per step.
        speed: TRL's step time divided by ours, on the same rows.
        cpu: the same for CPU time.
        our_memory, their_memory: bytes beyond what every trainer of this model needs.
    """

    method: str
    setting: Setting
    ours: float
    theirs: float
    speed: float
    cpu: float
    our_memory: float
    their_memory: float

    @property
    def floor(self) -> Floor | None:
        """The required speed and memory, if any."""
        return METHODS[self.method].floors[self.setting]

    def missed(self) -> list[str]:
        """Return the requirements that are not met, as sentences; empty if there are none."""
        floor, share = self.floor, self.our_memory / self.their_memory
        if floor is None:
            return []
        found = []
        if self.speed < floor.speed:
            found.append(f"{self.method}: speed is {self.speed:.2f} times TRL's, expected at least {floor.speed:g}")
        if share > floor.memory:
            found.append(f"{self.method}: memory is {share:.2f} of TRL's, expected at most {floor.memory:.2f}")
        return found


def compare(method: str, setting: Setting, ours: Sequence[Result], theirs: Sequence[Result]) -> Comparison:
    """Combine the repeats of both sides; the n-th steps of a pair of runs used the same rows."""
    pairs = list(zip(ours, theirs, strict=True))
    return Comparison(
        method=method,
        setting=setting,
        ours=median(t for result in ours for t in result.wall),
        theirs=median(t for result in theirs for t in result.wall),
        speed=median(b / a for one, other in pairs for a, b in zip(one.wall, other.wall, strict=True)),
        cpu=median(b / a for one, other in pairs for a, b in zip(one.cpu, other.cpu, strict=True)),
        our_memory=median(result.memory for result in ours),
        their_memory=median(result.memory for result in theirs),
    )


def differences(method: str, ours: Result, theirs: Result, alike: float = ALIKE) -> list[str]:
    """Return the common metrics of the first step that differ, which means that the sides trained on different tokens.

    A metric missing on both sides, because a small batch has no such row, does not differ.
    """
    pairs = {name: [side.first.get(name, math.nan) for side in (ours, theirs)] for name in METHODS[method].same}
    return [
        f"{name} {a:.6g} and {b:.6g}"
        for name, (a, b) in pairs.items()
        if not math.isclose(a, b, rel_tol=alike) and not (math.isnan(a) and math.isnan(b))
    ]


def title(method: str) -> str:
    """Return a method's name as written in prose."""
    return {"online_dpo": "Online DPO"}.get(method, method.upper())


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a Markdown table, one line per comparison."""
    lines = [
        "| method | engine | step, ours | step, TRL | speedup | CPU time ratio | memory, ours | memory, TRL "
        "| memory ratio | target |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in comparisons:
        floor = c.floor
        wanted = f"{floor.speed:g}x, {floor.memory:.2f}: {'not met' if c.missed() else 'met'}" if floor else "-"
        lines.append(
            f"| {title(c.method)} | {c.setting.title} | {c.ours:.2f} s | {c.theirs:.2f} s | {c.speed:.2f} "
            f"| {c.cpu:.2f} | {c.our_memory / _MIB:.0f} MiB | {c.their_memory / _MIB:.0f} MiB "
            f"| {c.our_memory / c.their_memory:.2f} | {wanted} |"
        )
    return "\n".join(lines)
