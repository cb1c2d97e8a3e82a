"""Covering arrays: small sets of combinations in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def everything(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool] = lambda combination: True
) -> list[Combination]:
    """Return all allowed combinations of one value of each factor."""
    made = (dict(zip(factors, values)) for values in itertools.product(*factors.values()))
    return [combination for combination in made if allowed(combination)]


def pairs(combination: Combination) -> set[Pair]:
    """Return the pairs of values in a combination."""
    return set(itertools.combinations(combination.items(), 2))


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool] = lambda combination: True
) -> list[Combination]:
    """Return a small subset of :func:`everything` in which every possible pair of values occurs.

    The algorithm is greedy: it adds the combination with the most new pairs, the first one in case of ties, so the
    same factors always give the same subset.

    Raises:
        AssertionError: a pair is missing from the result.
    """
    candidates = everything(factors, allowed)
    numbers: dict[Pair, int] = {}
    for combination in candidates:
        for pair in itertools.combinations(combination.items(), 2):
            numbers.setdefault(pair, len(numbers))
    masks = [sum(1 << numbers[pair] for pair in pairs(combination)) for combination in candidates]
    missing, taken = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(masks)), key=lambda place: (masks[place] & missing).bit_count())
        missing &= ~masks[best]
        taken.append(candidates[best])
    covered = set().union(*map(pairs, taken))
    assert covered == numbers.keys(), f"not covered: {numbers.keys() - covered}"
    return taken


def covering(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Combination], bool] = lambda combination: True,
    *,
    count: int,
) -> list[Combination]:
    """Return ``count`` combinations; from some number on, every possible pair of values occurs in them.

    The first ones are the same for every ``count``. Unlike :func:`pairwise`, it does not enumerate all combinations:
    each one is the best of a few random ones that contain a missing pair. A pair that none of them contains is taken
    to be disallowed.
    """
    rng = random.Random(0)
    missing = {pair for one, other in itertools.combinations(factors, 2) for pair in _values(factors, one, other)}
    order = sorted(missing, key=repr)
    taken: list[Combination] = []
    while len(taken) < count:
        wanted = next((pair for pair in order if pair in missing), ())
        drawn = [{name: rng.choice(values) for name, values in factors.items()} | dict(wanted) for _ in range(400)]
        candidates = [combination for combination in drawn if allowed(combination)][:60]
        if candidates:
            taken.append(max(candidates, key=lambda combination: len(pairs(combination) & missing)))
            missing -= pairs(taken[-1])
        missing.discard(wanted)  # type: ignore[arg-type]
    return taken


def _values(factors: Mapping[str, Sequence[Any]], one: str, other: str) -> set[Pair]:
    return {((one, value), (other, second)) for value in factors[one] for second in factors[other]}
