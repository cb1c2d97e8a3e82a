"""The covering arrays that select the runs of the engine tests."""

from __future__ import annotations

from support.pairwise import everything, pairs
from support.split_grid import FACTORS, allowed, sampled


def met(combinations: list[dict[str, object]]) -> set[object]:
    return set().union(*map(pairs, combinations))


def test_the_sampled_runs_cover_the_grid() -> None:
    taken = sampled()
    assert met(taken) == met(everything(FACTORS, allowed))
    assert len(taken) == len({tuple(case.values()) for case in taken}) <= 60
