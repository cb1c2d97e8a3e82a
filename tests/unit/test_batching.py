"""Collation of planned rows: every position, target and segment is checked manually."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from alignment.data.batching import Batch, EpochWindows, MicroBatches, collate, ends, merged
from alignment.data.kinds.base import Kind
from alignment.data.kinds.pairs import PAIRS, PreferenceBatch, collate_pairs
from alignment.data.kinds.prompts import PROMPTS, PromptBatch
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.kinds.unpaired import UNPAIRED, UnpairedBatch
from alignment.data.windows import MicroBatch, WindowCounts, WindowPlan, WindowSampler, evaluation_plan, row_table

LABELED_ROWS = Dataset.from_dict(
    {
        "prompt_ids": [[10, 11], [20], [30, 31, 32], [40, 41]],
        "completion_ids": [[12, 13, 14], [21, 22], [33], [42, 43, 44, 45]],
        "label": [True, False, True, False],
        "prompt_key": [5, 6, 7, 5],
        "row": [0, 1, 2, 3],
    }
)
PAIRED_ROWS = Dataset.from_dict(
    {
        "prompt_ids": [[10, 11], [20], [30]],
        "chosen_ids": [[12, 13], [21], [31, 32]],
        "rejected_ids": [[14], [22, 23, 24], [33]],
        "row": [0, 1, 2],
    }
)


def planned(*shares: MicroBatch, longest: int = 9, longest_mismatched: int = 4) -> WindowPlan:
    """A window of one micro-batch."""
    return WindowPlan(0, 0, (shares,), (longest,), (longest_mismatched,), WindowCounts(0, 0, 0, 0, 0))


def tensors(batch: Any) -> dict[str, Any]:
    """Convert a batch to plain Python values."""
    found: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = (str(value.dtype), value.tolist())
        elif isinstance(value, dict):
            found |= {name: (str(leaf.dtype), leaf.tolist()) for name, leaf in value.items()}
        elif isinstance(value, Batch):
            found |= {f"{field.name}.{name}": leaf for name, leaf in tensors(value).items()}
        else:
            found[field.name] = value
    return found


def test_collate_a_small_batch() -> None:
    batch = collate([([1, 2], [3, 4, 5]), ([6], [7])], longest=6)
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.positions.tolist() == [1, 2, 3, 5]
    assert batch.targets.tolist() == [3, 4, 5, 7]
    assert batch.segments.tolist() == [0, 0, 0, 1]
    assert batch.lengths.tolist() == [3, 1]
    assert batch.longest == 6
    assert {value.dtype for value in vars(batch).values() if isinstance(value, torch.Tensor)} == {torch.int64}


def test_every_target_follows_its_position() -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for prompt, completion in torch.randint(1, 7, (20, 2), generator=generator).tolist():
        ids = torch.randint(1, 99, (prompt + completion,), generator=generator).tolist()
        sequences.append((ids[:prompt], ids[prompt:]))
    batch = collate(sequences, longest=0)
    assert torch.equal(batch.inputs["input_ids"].flatten()[batch.positions + 1], batch.targets)
    for number, (prompt, completion) in enumerate(sequences):
        assert batch.targets[batch.segments == number].tolist() == completion
        assert batch.inputs["input_ids"][number][batch.inputs["attention_mask"][number] == 1].tolist() == [
            *prompt,
            *completion,
        ]


@pytest.mark.parametrize("last", [False, True])
def test_an_empty_batch_is_an_unscored_dummy_token_without_ends(last: bool) -> None:
    batch = collate([], longest=8)
    ids, mask = batch.inputs["input_ids"].tolist(), batch.inputs["attention_mask"].tolist()
    assert (ids, mask, batch.longest) == ([[0]], [[1]], 8)
    found = ends(batch, longest=2) if last else batch
    for part in (found.positions, found.targets, found.segments, found.lengths):
        assert part.tolist() == [] and part.dtype == torch.int64
    assert found.longest == (2 if last else 8)


def test_an_empty_completion_keeps_its_sequence() -> None:
    batch = collate([([1, 2], []), ([3], [4])], longest=1)
    assert (batch.lengths.tolist(), batch.segments.tolist(), batch.positions.tolist()) == ([0, 1], [1], [2])


def test_ends_are_the_last_tokens_for_any_row_order() -> None:
    sequences = [([1], [2, 3]), (list(range(10, 700)), [700, 701]), ([4, 5], [6])]
    batch = collate(sequences, longest=9)
    assert len(batch.blocks) == 2  # the rows are not in the order of the sequences
    found = ends(batch)
    assert found.targets.tolist() == found.inputs["input_ids"].flatten()[found.positions].tolist() == [3, 701, 6]
    last = [
        int(batch.inputs["attention_mask"][p // batch.inputs["input_ids"].shape[1]].sum()) - 1
        for p in found.positions.tolist()
    ]
    assert (found.positions % batch.inputs["input_ids"].shape[1]).tolist() == last
    assert (found.segments.tolist(), found.lengths.tolist(), found.longest) == ([0, 1, 2], [1, 1, 1], 3)
    assert found.inputs["input_ids"] is batch.inputs["input_ids"] and found.blocks == batch.blocks
    assert batch.longest == 9 and ends(batch, longest=5).longest == 5


def test_merged_batches_have_all_sequences_in_order() -> None:
    """Of several widths, one of them sorted, one without any sequence, and one with an unscored sequence."""
    rows = [
        [(range(2, 5), range(5, 8)), (range(2, 5), range(9, 11))],
        [(range(20, 22), range(22, 30)), (range(40, 42), range(42, 900)), (range(30, 33), range(33, 35))],
        [],
        [(range(50, 52), range(0)), (range(60, 61), range(61, 65))],
    ]
    parts = [collate(each, longest, groups=[(0, 1)] if each else ()) for each, longest in zip(rows, (7, 900, 1, 4))]
    whole = merged(parts)
    flat, sequences = whole.inputs["input_ids"].flatten(), [each for part in rows for each in part]
    assert flat[whole.positions + 1].tolist() == whole.targets.tolist()
    assert whole.lengths.tolist() == [len(completion) for _, completion in sequences]
    for number, (prompt, completion) in enumerate(sequences):
        own = whole.segments == number
        assert whole.targets[own].tolist() == [*completion]
        if completion:
            assert flat[whole.positions[own][0]] == prompt[-1] and flat[whole.ends[number]] == completion[-1]
    assert (
        whole.inputs["attention_mask"].sum(1).tolist() == [*whole.sizes] == [s for part in parts for s in part.sizes]
    )
    assert whole.longest == 912
    assert [rows for rows, _ in whole.blocks] == [2, 1, 2, 1, 2]
    for group in whole.groups:
        first, second = whole.inputs["input_ids"][list(group.sequences), : group.prefix]
        assert torch.equal(first, second)
    packed, several = whole.packed(), [part.packed() for part in parts]
    row = [each.inputs["input_ids"][0] for each in several]
    assert packed.inputs["input_ids"][0].tolist() == torch.cat(row).tolist()
    assert packed.inputs["input_ids"][0][packed.ends].tolist() == flat[whole.ends].tolist()


def test_unpaired_rows_with_partners() -> None:
    plan = planned(MicroBatch((1, 3, 0), (0, -1, 3), (3, 0, 2)))
    batch = UNPAIRED.collate(LABELED_ROWS, plan, 0, 0)
    assert batch.rows == (1, 3, 0)
    assert batch.labels.tolist() == [False, False, True] and batch.labels.dtype == torch.bool
    assert batch.matched.inputs["input_ids"].tolist() == [
        [20, 21, 22, 0, 0, 0],
        [40, 41, 42, 43, 44, 45],
        [10, 11, 12, 13, 14, 0],
    ]
    # Three tokens of row 0's completion fit after row 1's prompt, and two of row 3's after row 0's.
    assert batch.mismatched.inputs["input_ids"].tolist() == [[20, 12, 13, 14], [10, 11, 42, 43]]
    assert batch.mismatched.targets.tolist() == [12, 13, 14, 42, 43]
    assert (batch.matched.longest, batch.mismatched.longest, batch.joint.longest) == (9, 4, 13)


def test_joint_is_matched_then_mismatched() -> None:
    batch = UNPAIRED.collate(LABELED_ROWS, planned(MicroBatch((2, 0), (0, 2), (3, 1))), 0, 0)
    parts = (batch.matched, batch.mismatched)
    assert batch.joint.lengths.tolist() == [1, 3, 3, 1]
    assert batch.joint.targets.tolist() == torch.cat([part.targets for part in parts]).tolist()
    assert batch.joint.segments.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [row[:4] for row in batch.joint.inputs["input_ids"].tolist()] == [
        [30, 31, 32, 33],
        [10, 11, 12, 13],
        [30, 31, 32, 12],
        [10, 11, 33, 0],
    ]


def test_pairs_have_the_chosen_completions_first() -> None:
    batch = PAIRS.collate(PAIRED_ROWS, planned(MicroBatch((1, 0), (-1, -1))), 0, 0)
    assert batch.rows == (1, 0)
    assert batch.pairs.inputs["input_ids"].tolist() == [
        [20, 21, 0, 0],
        [10, 11, 12, 13],
        [20, 22, 23, 24],
        [10, 11, 14, 0],
    ]
    assert batch.pairs.lengths.tolist() == [1, 2, 3, 1] and batch.pairs.longest == 9


def test_pairs_with_margins() -> None:
    data = PAIRED_ROWS.add_column("margin", [0.5, 0.0, -1.0])
    plan = planned(MicroBatch((2, 0), (-1, -1)), MicroBatch((), ()))
    batch = SCORED_PAIRS.collate(data, plan, 0, 0)
    assert tensors(batch) == tensors(PAIRS.collate(data, plan, 0, 0)) | {"margins": ("torch.float32", [-1.0, 0.5])}
    moved = batch.to(torch.device("meta"))
    assert moved.margins is not None and moved.margins.is_meta
    assert tensors(SCORED_PAIRS.collate(data, plan, 0, 1))["margins"] == ("torch.float32", [])


def test_pairs_of_ids_equal_those_of_a_dataset() -> None:
    own = PAIRS.collate(PAIRED_ROWS, planned(MicroBatch((1, 0), (-1, -1))), 0, 0)
    given = collate_pairs((1, 0), [([20], [21], [22, 23, 24]), ((10, 11), (12, 13), (14,))], 9)
    assert tensors(given) == tensors(own) and given.margins is None
    nothing = collate_pairs((), [], 3)
    assert nothing.pairs.lengths.tolist() == [] and nothing.pairs.longest == 3


PROMPT_ROWS = Dataset.from_dict({"prompt_ids": [[1, 2], [3], [4, 5, 6], [7, 8]], "row": [0, 1, 2, 3]})


def test_prompts_are_planned_by_their_own_length() -> None:
    table = row_table(PROMPT_ROWS, (), 10)
    assert table.prompt.tolist() == [2, 1, 3, 2] and table.completions.shape == (4, 0)
    plan = evaluation_plan(table, world_size=2, batch_size=1, seed=0, draw_partners=False)
    assert [[share.rows for share in shares] for shares in plan.micro_batches] == [[(2,), (0,)], [(3,), (1,)]]
    assert plan.longest == plan.longest_mismatched == (0, 0)
    assert plan.counts == WindowCounts(4, 0, 0, 0, 0)
    budgeted = evaluation_plan(table, world_size=1, batch_size=1, seed=0, draw_partners=False, max_tokens=6)
    assert [share.rows for (share,) in budgeted.micro_batches] == [(2, 0), (3, 1)]
    sampler = WindowSampler(table, world_size=1, batch_size=2, accumulation=1, seed=0)
    rows = [row for step in range(2) for (share,) in sampler.plan(0, step).micro_batches for row in share.rows]
    assert sorted(rows) == [0, 1, 2, 3]


def test_prompts_are_collated_as_ids() -> None:
    plan = planned(MicroBatch((2, 0), (-1, -1)), MicroBatch((), ()))
    assert PROMPTS.collate(PROMPT_ROWS, plan, 0, 0) == PromptBatch((2, 0), ((4, 5, 6), (1, 2)))
    assert PROMPTS.collate(PROMPT_ROWS, plan, 0, 1) == PromptBatch((), ())


@pytest.mark.parametrize(("kind", "data"), [(UNPAIRED, LABELED_ROWS), (PAIRS, PAIRED_ROWS)])
def test_a_rank_without_rows_gets_a_dummy(kind: Kind, data: Dataset) -> None:
    plan = planned(MicroBatch((0,), (-1,)), MicroBatch((), ()))
    batch = kind.collate(data, plan, 0, 1)
    assert batch.rows == ()
    parts = [batch.pairs] if isinstance(batch, PreferenceBatch) else [batch.matched, batch.mismatched, batch.joint]
    for part in parts:
        assert part.inputs["input_ids"].shape == (1, 1) and part.lengths.tolist() == []
    if isinstance(batch, UnpairedBatch):
        assert batch.labels.tolist() == [] and batch.labels.dtype == torch.bool


def test_to_moves_every_tensor_and_nothing_else() -> None:
    batch = UNPAIRED.collate(LABELED_ROWS, planned(MicroBatch((2, 0), (0, 2), (3, 1))), 0, 0)
    moved = batch.to(torch.device("meta"))
    assert moved.labels.is_meta and moved.rows == batch.rows and not batch.labels.is_meta
    for name in ("matched", "mismatched", "joint"):
        part = getattr(moved, name)
        assert all(v.is_meta for v in (*vars(part).values(), *part.inputs.values()) if isinstance(v, torch.Tensor))
        assert part.longest == getattr(batch, name).longest
    assert tensors(batch.to(torch.device("cpu"))) == tensors(batch)


def test_row_table() -> None:
    table = row_table(LABELED_ROWS, ("completion_ids",), 30)
    assert (table.prompt.tolist(), table.completions.tolist()) == ([2, 1, 3, 2], [[3], [2], [1], [4]])
    assert (
        table.labels is not None and table.labels.dtype == bool and table.labels.tolist() == LABELED_ROWS["label"][:]
    )
    assert table.prompt_key is not None and table.prompt_key.tolist() == [5, 6, 7, 5]
    assert (table.max_length, len(table)) == (30, 4)
    pairs = row_table(PAIRED_ROWS, ("chosen_ids", "rejected_ids"), None)
    assert pairs.completions.tolist() == [[2, 1], [1, 3], [2, 1]]
    assert pairs.labels is None and pairs.prompt_key is None and pairs.max_length is None
    chosen = row_table(LABELED_ROWS.select([3, 1]), ("completion_ids",), None)
    assert chosen.prompt.tolist() == [2, 1] and chosen.completions.tolist() == [[4], [2]]


def test_micro_batches_are_collated_on_access() -> None:
    table = row_table(LABELED_ROWS, ("completion_ids",), None)
    sampler = WindowSampler(table, world_size=1, batch_size=1, accumulation=3, seed=0, draw_partners=True)
    batches = MicroBatches(UNPAIRED.collate, LABELED_ROWS, sampler.plan(0, 0), 0)
    assert len(batches) == 3
    assert [batch.rows for batch in batches] == [share.rows for (share,) in sampler.plan(0, 0).micro_batches]
    for wrong in (3, -1):
        with pytest.raises(IndexError):
            batches[wrong]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_returns_the_same_windows_with_and_without_workers(rank: int) -> None:
    rows = LABELED_ROWS.select([i % 4 for i in range(13)])
    table = row_table(rows, ("completion_ids",), 6)
    sampler = WindowSampler(table, world_size=2, batch_size=2, accumulation=1, seed=3, draw_partners=True)
    found = []
    for workers in (0, 2):
        data = EpochWindows(UNPAIRED.collate, rows, sampler, 1, rank)
        loader: DataLoader[Any] = DataLoader(data, batch_size=None, sampler=range(1, 4), num_workers=workers)
        found.append([(plan, [tensors(batch) for batch in batches]) for plan, batches in loader])
    assert len(data) == 4
    assert found[0] == found[1]
    assert [plan for plan, _ in found[0]] == [sampler.plan(1, step) for step in (1, 2, 3)]
    assert [b["rows"] for _, batches in found[0] for b in batches] == [
        micro[rank].rows for step in (1, 2, 3) for micro in sampler.plan(1, step).micro_batches
    ]
