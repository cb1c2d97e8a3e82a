"""The covering arrays that select the runs of the engine tests."""

from __future__ import annotations

import itertools

from support.pairwise import everything, pairs, pairwise
from support.split_grid import FACTORS, allowed, sampled

SMALL = {"a": (1, 2, 3), "b": (1, 2, 3), "c": ("x", "y"), "d": (False, True)}


def met(combinations: list[dict[str, object]]) -> set[object]:
    return set().union(*map(pairs, combinations))


def test_few_combinations_cover_every_pair() -> None:
    taken = pairwise(SMALL)
    for one, other in itertools.combinations(SMALL, 2):
        found = {(combination[one], combination[other]) for combination in taken}
        assert found == set(itertools.product(SMALL[one], SMALL[other]))
    assert 9 <= len(taken) <= 12 < len(everything(SMALL))


def test_disallowed_pairs_are_excluded() -> None:
    taken = pairwise(SMALL, lambda combination: combination["a"] != combination["b"])
    assert all(combination["a"] != combination["b"] for combination in taken)
    assert (("a", 1), ("b", 2)) in met(taken) and (("a", 1), ("b", 1)) not in met(taken)


def test_the_sampled_runs_cover_the_grid() -> None:
    taken = sampled()
    assert met(taken) == met(everything(FACTORS, allowed))
    assert len(taken) == len({tuple(case.values()) for case in taken}) <= 60
