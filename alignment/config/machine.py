"""The machine that a run is planned for, where that is not the one that plans it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a plan depends on beside its options.

    Attributes:
        ranks: number of processes.
        cuda: whether each of them has a GPU, which computes in bf16.
    """

    ranks: int
    cuda: bool

    def __str__(self) -> str:
        device = "a GPU each that computes in bf16" if self.cuda else "CPUs"
        return f"{self.ranks} rank(s) with {device}"


_planned: list[Machine] = []


def planned() -> Machine | None:
    """The machine to plan for; None: the one that this process runs on."""
    return _planned[-1] if _planned else None


@contextlib.contextmanager
def planning_for(machine: Machine) -> Iterator[None]:
    """Within this context options are checked, and engines planned, for ``machine``; nothing can be trained."""
    _planned.append(machine)
    try:
        yield
    finally:
        _planned.pop()
