"""KTO's partners: a derangement of a window's rows, with a different prompt if possible."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from alignment.data.windows import RowTable, derangement, plan_window


def groupings(count: int) -> Iterator[list[int]]:
    """Return every way to assign keys to ``count`` rows, up to renaming."""

    def grow(keys: list[int]) -> Iterator[list[int]]:
        if len(keys) == count:
            yield keys
        else:
            for key in range(max(keys, default=-1) + 2):
                yield from grow([*keys, key])

    return grow([])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_partners_differ_in_prompt_as_often_as_possible(count: int) -> None:
    candidates = [p for p in itertools.permutations(range(count)) if all(i != j for i, j in enumerate(p))]
    for keys in groupings(count):
        best = max(sum(keys[i] != keys[j] for i, j in enumerate(p)) for p in candidates)
        for seed in range(3):
            partners = derangement(np.array(keys), np.random.default_rng(seed))
            assert tuple(partners) in candidates
            assert sum(keys[i] != keys[j] for i, j in enumerate(partners)) == best, keys


@pytest.mark.parametrize("seed", range(40))
def test_partners_of_larger_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(7, 200))
    skew = rng.random() ** 3  # from all prompts equal to almost all different
    keys = rng.integers(-(2**62), 2**62, max(1, int(count * skew)))[rng.zipf(1.5, count) % max(1, int(count * skew))]
    partners = derangement(keys, rng)
    assert sorted(partners) == list(range(count))
    assert (partners != np.arange(count)).all()
    largest = max(Counter(keys.tolist()).values())
    assert int((keys == keys[partners]).sum()) == max(0, 2 * largest - count)


def test_all_pairs_of_rows_are_equally_likely() -> None:
    met = np.zeros((5, 5))
    draws = 4000
    for seed in range(draws):
        met[np.arange(5), derangement(np.array([50, 3, 20, 11, 7]), np.random.default_rng(seed))] += 1
    share = met / draws
    assert (np.diag(share) == 0).all()
    assert np.abs(share + np.eye(5) / 4 - 0.25).max() < 0.03  # four standard deviations


def test_a_single_row_has_no_partner() -> None:
    assert derangement(np.array([3]), np.random.default_rng(0)).tolist() == [-1]
    assert derangement(np.array([], dtype=np.int64), np.random.default_rng(0)).tolist() == []


def test_a_mismatched_completion_is_truncated_to_max_length() -> None:
    table = RowTable(np.array([6, 2, 9]), np.array([[3], [8], [1]]), max_length=10)
    rows, partners = np.array([0, 1, 2, 0, 2]), np.array([1, 0, 0, -1, 1])
    for each, kept in ((table, [4, 3, 1, 0, 1]), (RowTable(table.prompt, table.completions), [8, 3, 3, 0, 8])):
        ((micro,),) = plan_window(each, rows, partners, world_size=1, batch_size=5).micro_batches
        fits = dict(zip(zip(micro.rows, micro.partners), micro.mismatched))
        assert [fits[pair] for pair in zip(rows.tolist(), partners.tolist())] == kept
