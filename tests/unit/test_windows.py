"""Window plans: order, partitioning, counts, stratification, resuming."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.config.errors import OptionError
from alignment.data.windows import (
    MicroBatch,
    RowTable,
    WindowPlan,
    WindowSampler,
    evaluation_plan,
    micro_tokens,
    set_partners,
)


def make_table(rows: int, seed: int = 0, pairs: bool = False, desirable: int | None = None) -> RowTable:
    """Random lengths; ``desirable`` labels are True; prompts repeat."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(rows, dtype=bool)
    labels[rng.permutation(rows)[: rows // 2 if desirable is None else desirable]] = True
    return RowTable(
        prompt=rng.integers(1, 20, rows),
        completions=rng.integers(1, 40, (rows, 2 if pairs else 1)),
        labels=None if pairs else labels,
        prompt_key=rng.integers(0, max(2, rows // 2), rows),
        max_length=45,
    )


def make_sampler(table: RowTable, world: int = 1, batch: int = 4, steps: int = 1, **more: Any) -> WindowSampler:
    return WindowSampler(table, world_size=world, batch_size=batch, accumulation=steps, **{"seed": 7, **more})


TABLES = st.builds(make_table, st.integers(1, 40), st.integers(0, 9), st.booleans())
WORLD, BATCH, TOKENS = st.integers(1, 5), st.integers(1, 4), st.one_of(st.none(), st.integers(45, 400))


def shares(plan: WindowPlan) -> Iterator[MicroBatch]:
    return itertools.chain.from_iterable(plan.micro_batches)


def pairs_of(plan: WindowPlan) -> list[tuple[int, int]]:
    return sorted(pair for own in shares(plan) for pair in zip(own.rows, own.partners, strict=True))


def rows_of(plan: WindowPlan) -> list[int]:
    return sorted(row for own in shares(plan) for row in own.rows)


def epoch_of(sampler: WindowSampler, epoch: int = 0) -> list[WindowPlan]:
    return [sampler.plan(epoch, step) for step in range(sampler.steps_per_epoch)]


@given(TABLES, WORLD, BATCH, st.integers(1, 3), TOKENS, st.booleans(), st.integers(1, 60))
def test_the_largest_micro_batch_of_a_run(
    table: RowTable, world: int, batch: int, passes: int, tokens: int | None, packs: bool, steps: int
) -> None:
    """Among all remaining windows, also of later epochs."""
    sampler = make_sampler(table, world, batch, passes, max_tokens=tokens, packs=packs)
    sampler.step = sampler.steps_per_epoch // 2
    found, position = sampler.largest(steps), dataclasses.replace(sampler)
    sizes: list[list[int]] = [[], []]
    for _ in range(steps):
        plan = position.plan(position.epoch, position.step)
        for micro in range(len(plan.micro_batches)):
            sizes[min(micro, 1)].append(micro_tokens(table, plan, micro, packs))
        position.advance()
    assert len(found.micro_batches) == len(found.longest) == len(found.longest_mismatched) == 1 + any(sizes[1])
    for micro, known in enumerate(each for each in sizes if each):
        size = micro_tokens(table, found, micro, packs)
        assert 0.7 * max(known) <= size <= max(known)
        if packs and tokens is None and micro == 0:
            assert size == max(known), "rows are sorted by other lengths only if there are two of them"
    assert (sampler.epoch, sampler.step) == (0, sampler.steps_per_epoch // 2)


def test_a_last_window_of_one_row_has_no_partner() -> None:
    plans = epoch_of(make_sampler(make_table(9), draw_partners=True))
    assert [plan.counts.partnered for plan in plans] == [4, 4, 0]
    assert next(shares(plans[-1])).partners == (-1,)


def test_partners_are_drawn_from_each_window() -> None:
    table = make_table(8, seed=3)
    sampler = make_sampler(table, batch=8, draw_partners=True)  # the only window of every epoch has the same rows
    drawn = {tuple(partner for _, partner in pairs_of(sampler.plan(epoch, 0))) for epoch in range(20)}
    assert len(drawn) >= 15
    assert pairs_of(sampler.plan(0, 0)) == pairs_of(make_sampler(table, batch=8, draw_partners=True).plan(0, 0))
    other = make_sampler(table, batch=8, draw_partners=True, seed=8)
    assert any(pairs_of(sampler.plan(e, 0)) != pairs_of(other.plan(e, 0)) for e in range(3))
    alike = RowTable(table.prompt, table.completions, prompt_key=np.zeros(8, dtype=np.int64))
    places = set()
    for epoch in range(10):
        sampler = make_sampler(alike, batch=8, draw_partners=True)
        place = {int(row): position for position, row in enumerate(sampler.order(epoch))}
        places.add(tuple(sorted((place[row], place[partner]) for row, partner in pairs_of(sampler.plan(epoch, 0)))))
    assert len(places) == 10, "resampled, not only carried along with the order"


@given(keys=st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_partners_have_other_prompts_if_possible(keys: list[int]) -> None:
    table = RowTable(np.ones(len(keys)), np.ones((len(keys), 1)), prompt_key=np.array(keys))
    rows, partners = zip(*pairs_of(make_sampler(table, batch=12, draw_partners=True).plan(0, 0)), strict=True)
    assert sorted(partners) == list(rows) and not any(map(int.__eq__, rows, partners))
    alike = sum(keys[row] == keys[partner] for row, partner in zip(rows, partners, strict=True))
    assert alike == max(0, 2 * max(Counter(keys).values()) - len(keys))


# Order and splits ---------------------------------------------------------------------------------------------------


@given(table=TABLES, world=WORLD, batch=BATCH, steps=BATCH, stratify=st.booleans(), drop_last=st.booleans())
def test_an_epoch_has_every_row_once(
    table: RowTable, world: int, batch: int, steps: int, stratify: bool, drop_last: bool
) -> None:
    """In windows of batch size x accumulation x ranks; ``drop_last`` leaves out an incomplete one."""
    rows, window = len(table), world * batch * steps
    sampler = make_sampler(table, world, batch, steps, stratify=stratify and table.labels is not None)
    sampler = dataclasses.replace(sampler, drop_last=drop_last)
    full, rest = divmod(rows, window)
    for epoch in (0, 1):
        found = list(map(rows_of, epoch_of(sampler, epoch)))
        assert list(map(len, found)) == [window] * full + [rest] * (rest > 0 and not drop_last)
        once = sorted(itertools.chain.from_iterable(found))
        assert len(set(once)) == len(once) and (drop_last or once == list(range(rows)))


def test_the_order_depends_on_seed_and_epoch() -> None:
    table = make_table(50)
    first, same, other = make_sampler(table), make_sampler(table), make_sampler(table, seed=8)
    assert first.order(0).tolist() == same.order(0).tolist() != other.order(0).tolist()
    assert first.order(1).tolist() != first.order(0).tolist()
    assert first.order(0).tolist() == same.order(0).tolist()  # also after another epoch was requested
    assert first.plan(1, 2) == same.plan(1, 2)
    assert (first.plan(1, 2).epoch, first.plan(1, 2).step) == (1, 2)
    mixed = make_sampler(table, stratify=True)
    assert mixed.order(1).tolist() != mixed.order(0).tolist()


@given(table=TABLES, world=st.sampled_from([1, 2, 4, 8]), batch=st.sampled_from([1, 2, 4, 8]), max_tokens=TOKENS)
def test_windows_do_not_depend_on_partitioning(
    table: RowTable, world: int, batch: int, max_tokens: int | None
) -> None:
    drawn = table.completions.shape[1] == 1
    one = make_sampler(table, 1, 64, draw_partners=drawn)
    split = make_sampler(table, world, batch, 64 // (world * batch), draw_partners=drawn, max_tokens=max_tokens)
    assert [(pairs_of(plan), plan.counts) for plan in epoch_of(split)] == [
        (pairs_of(plan), plan.counts) for plan in epoch_of(one)
    ]


@given(table=TABLES, world=WORLD, max_tokens=TOKENS, packs=st.booleans())
def test_every_rank_has_the_same_number_of_micro_batches(
    table: RowTable, world: int, max_tokens: int | None, packs: bool
) -> None:
    """Also with fewer rows than ranks; a budget of tokens, padded or packed, divides windows only."""
    drawn, size = table.completions.shape[1] == 1, packed if packs else padded
    for plan in epoch_of(make_sampler(table, world, 2, 3, draw_partners=drawn, max_tokens=max_tokens, packs=packs)):
        for micro in plan.micro_batches:
            sizes = [len(own.rows) for own in micro]
            assert len(micro) == world and max(sizes) - min(sizes) <= 1 <= max(sizes)
            assert max_tokens is not None or max(sizes) <= 2
            assert all(max_tokens is None or len(own.rows) <= 1 or size(table, own) <= max_tokens for own in micro)


def packed(table: RowTable, own: MicroBatch) -> int:
    """Return the tokens of one forward pass without padding, in which completions share their prompt."""
    return sum(int(table.prompt[row] + table.completions[row].sum()) for row in own.rows)


def padded(table: RowTable, own: MicroBatch) -> int:
    """Return the padded tokens of one forward pass, computed row by row."""
    widths = []
    for row, partner in zip(own.rows, own.partners, strict=True):
        prompt, longest = int(table.prompt[row]), int(table.completions[row].max())
        widths.append(prompt + longest)
        if partner >= 0:
            assert table.max_length is not None
            widths.append(min(prompt + int(table.completions[partner, 0]), max(table.max_length, prompt)))
    return max(widths) * len(own.rows) * table.completions.shape[1]


def test_a_token_budget_packs_more_short_rows() -> None:
    table = RowTable(np.full(12, 2), np.array([[38], [38]] + [[3]] * 10))
    plan = make_sampler(table, batch=12, max_tokens=40).plan(0, 0)
    assert [len(micro[0].rows) for micro in plan.micro_batches] == [1, 1, 8, 2]
    assert plan.longest == (38, 38, 24, 6)
    plan = make_sampler(RowTable(np.full(4, 8), np.full((4, 2), 4)), batch=4, max_tokens=48, packs=True).plan(0, 0)
    assert [len(micro[0].rows) for micro in plan.micro_batches] == [3, 1], "16 tokens, of which 8 are shared"


def test_the_longest_rows_come_first_and_are_distributed_over_ranks() -> None:
    table = RowTable(np.full(7, 1), np.array([[1], [2], [3], [4], [5], [6], [7]]))
    plan = make_sampler(table, world=2, batch=2, steps=2).plan(0, 0)
    assert [[own.rows for own in micro] for micro in plan.micro_batches] == [[(6, 4), (5, 3)], [(2, 0), (1,)]]
    assert plan.longest == (12, 4)


@given(table=TABLES)
def test_counts_and_longest_by_brute_force(table: RowTable) -> None:
    pairs = table.completions.shape[1] == 2
    for plan in epoch_of(make_sampler(table, 3, 2, 2, draw_partners=not pairs)):
        found: Counter[str] = Counter()
        for micro, longest, mismatched in zip(plan.micro_batches, plan.longest, plan.longest_mismatched, strict=True):
            scored, others = [], []
            for own in micro:
                scored.append(sum(int(length) for row in own.rows for length in table.completions[row]))
                kept = [
                    min(int(table.completions[p, 0]), 45 - int(table.prompt[r]))
                    for r, p in zip(own.rows, own.partners, strict=True)
                    if p >= 0
                ]
                others.append(sum(kept))
                for row in own.rows:
                    found["rows"] += 1
                    found["desirable"] += 0 if table.labels is None else int(table.labels[row])
                    found["first_completion_tokens"] += int(table.completions[row, 0])
                    found["sequence_tokens"] += sum(int(table.prompt[row] + c) for c in table.completions[row])
                found["partnered"] += len(kept)
            assert (longest, mismatched) == (max(scored), max(others))
        assert {**dict.fromkeys(vars(plan.counts), 0), **found} == vars(plan.counts)


@given(rows=st.integers(1, 60), window=st.integers(1, 20), share=st.floats(0, 1))
def test_stratified_windows_have_the_ratio_of_the_data(rows: int, window: int, share: float) -> None:
    desirable = round(rows * share)
    sampler = make_sampler(make_table(rows, desirable=desirable), batch=window, stratify=True)
    for epoch in range(3):
        for plan in epoch_of(sampler, epoch):
            assert abs(plan.counts.desirable - plan.counts.rows * desirable / rows) <= 1


# Resuming and evaluation --------------------------------------------------------------------------------------------


def walk(sampler: WindowSampler, steps: int) -> list[WindowPlan]:
    plans = []
    for _ in range(steps):
        plans.append(sampler.plan(sampler.epoch, sampler.step))
        sampler.advance()
    return plans


@pytest.mark.parametrize("stratify", [False, True])
def test_resuming_at_any_window_gives_the_same_rest(stratify: bool) -> None:
    table, more = make_table(14), {"draw_partners": True, "stratify": stratify}
    expected = walk(make_sampler(table, **more), 10)  # four windows per epoch
    assert [(plan.epoch, plan.step) for plan in expected[2:6]] == [(0, 2), (0, 3), (1, 0), (1, 1)]
    for done in range(10):
        first = make_sampler(table, **more)
        walk(first, done)
        resumed = make_sampler(table, **more)
        resumed.load_state_dict(first.state_dict())
        assert walk(resumed, 10 - done) == expected[done:]
    split = make_sampler(table, world=2, batch=1, steps=2, **more)
    split.load_state_dict(make_sampler(table, **more).state_dict())
    assert [pairs_of(plan) for plan in walk(split, 10)] == [pairs_of(plan) for plan in expected]


def test_a_state_of_another_run_is_refused() -> None:
    state = make_sampler(make_table(14)).state_dict()
    others = {
        "seed": make_sampler(make_table(14), seed=8),
        "rows": make_sampler(make_table(15)),
        "window": make_sampler(make_table(14), batch=5),
        "stratify": make_sampler(make_table(14), stratify=True),
        "partners": make_sampler(make_table(14), partners=set_partners(make_table(14), 7, draw=True)),
    }
    for key, sampler in others.items():
        with pytest.raises(OptionError, match=f"{key} is {state[key]} in the checkpoint but"):
            sampler.load_state_dict(state)
        assert (sampler.epoch, sampler.step) == (0, 0)


def test_partners_from_the_whole_set_are_fixed() -> None:
    """As in evaluations; rows are shuffled as usual, and the last window with a single row has a partner too."""
    table = make_table(13)
    partners = set_partners(table, 7, draw=True)
    evaluation = evaluation_plan(table, world_size=1, batch_size=4, seed=7, draw_partners=True)
    expected = list(enumerate(partners.tolist()))
    assert pairs_of(evaluation) == expected and set_partners(table, 8, draw=True).tolist() != partners.tolist()
    assert set_partners(table, 7, draw=False).tolist() == [-1] * 13
    fixed, drawn = (make_sampler(table, draw_partners=True, partners=p) for p in (partners, None))
    for epoch in (0, 1):
        plans = epoch_of(fixed, epoch)
        assert sorted(pair for plan in plans for pair in pairs_of(plan)) == expected
        assert [rows_of(plan) for plan in plans] == [rows_of(plan) for plan in epoch_of(drawn, epoch)]
        assert [plan.counts.partnered for plan in plans] == [4, 4, 4, 1]
    assert rows_of(fixed.plan(0, 0)) != rows_of(fixed.plan(1, 0))


def test_an_evaluation_is_one_window_for_any_batch_size() -> None:
    table = make_table(23)
    expected = evaluation_plan(table, world_size=1, batch_size=1, seed=5, draw_partners=True)
    assert [row for row, _ in pairs_of(expected)] == list(range(23))
    assert sorted(partner for _, partner in pairs_of(expected)) == list(range(23))
    assert expected.counts.partnered == 23
    for world, batch, max_tokens in [(1, 3, None), (1, 8, None), (2, 4, None), (3, 2, 90)]:
        plan = evaluation_plan(
            table, world_size=world, batch_size=batch, seed=5, draw_partners=True, max_tokens=max_tokens
        )
        assert pairs_of(plan) == pairs_of(expected) and plan.counts == expected.counts
    assert pairs_of(evaluation_plan(table, world_size=1, batch_size=1, seed=6, draw_partners=True)) != pairs_of(
        expected
    )
    alone = evaluation_plan(table, world_size=2, batch_size=4, seed=5, draw_partners=False)
    assert all(partner == -1 for _, partner in pairs_of(alone)) and alone.counts.partnered == 0


def test_sequential_order() -> None:
    table = RowTable(np.ones(6, dtype=np.int64), np.ones((6, 1), dtype=np.int64))
    one = make_sampler(table, world=1, batch=2, steps=1, sequential=True)
    assert [list(one.order(epoch)) for epoch in (0, 1)] == [[0, 1, 2, 3, 4, 5]] * 2
