"""Packing: assignment of sequences to packs, their content, and their use in batches, planning and scripts."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.config.errors import DataError
from alignment.data import packing
from alignment.data.columns import arranged
from alignment.data.kinds.completions import COMPLETIONS
from alignment.data.packed_rows import PackedRows
from alignment.data.packing import STRATEGIES, Packing, Packs, best_fit, pack_rows
from alignment.data.report import DataReport
from alignment.data.windows import evaluation_plan
from alignment.methods.sft import SFTMethod
from alignment.methods.sft_options import SFTConfig

# IDs show their origin: 31 is the second token of row 3. In row 1, one turn is not in the loss; in row 3, all tokens
# are.
ROWS = Dataset.from_list(
    [
        {"prompt_ids": [0, 1], "completion_ids": [2, 3, 4], "scored": None, "first": False, "row": 0},
        {"prompt_ids": [10], "completion_ids": [11, 12, 13], "scored": [True, False, True], "first": False, "row": 1},
        {"prompt_ids": [20, 21, 22, 23], "completion_ids": [24, 25], "scored": None, "first": False, "row": 2},
        {"prompt_ids": [30], "completion_ids": [31], "scored": None, "first": True, "row": 3},
    ],
)
BFD = Packing("bfd", 8)


def packed(packing: Packing, rows: Dataset = ROWS) -> tuple[Packs, PackedRows]:
    made = pack_rows(rows, packing)
    return made, PackedRows(rows, made)


def everything(rows: PackedRows) -> list[list[tuple[list[int], list[int]]]]:
    """Return the sequences of each pack: token IDs, and the predictable ones in the loss."""
    found: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(len(rows))]
    for pack, ids, learned in rows.sequences(range(len(rows))):
        found[pack].append((ids, [token for token, kept in list(zip(ids, learned))[1:] if kept]))
    return found


def plain_best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """The definition: search all packs; ties go to the pack that has had its remaining space for longest."""
    packs: list[list[int]] = []
    left: list[tuple[int, int]] = []  # remaining space and the time since when
    for time, number in enumerate(sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))):
        fitting = [(space, since, pack) for pack, (space, since) in enumerate(left) if space >= lengths[number]]
        if fitting:
            space, _, pack = min(fitting)
        else:
            space, pack = room, len(packs)
            packs.append([])
            left.append((room, time))
        packs[pack].append(number)
        left[pack] = (space - lengths[number], time)
    return packs


@given(lengths=st.lists(st.integers(1, 12), max_size=40), room=st.integers(12, 20))
def test_best_fit(lengths: list[int], room: int) -> None:
    assert best_fit(lengths, room) == plain_best_fit(lengths, room)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12),
    strategy=st.sampled_from(STRATEGIES),
    length=st.integers(10, 14),
)
def test_packs_hold_every_token_once(rows: list[tuple[int, int]], strategy: str, length: int) -> None:
    """Except those of spans without a token in the loss."""
    ids, parts = iter(range(1000)), []
    for prompt, completion in rows:
        parts.append((list(islice(ids, prompt)), list(islice(ids, completion))))
    columns = ("prompt_ids", "completion_ids")
    rest = {"scored": None, "first": False, "row": 0}
    data = Dataset.from_list([dict(zip(columns, part)) | rest for part in parts], features=ROWS.features)
    packs, found = packed(Packing(strategy, length if strategy == "bfd" else length // 3), data)
    spans = [ids for pack in everything(found) for ids, _ in pack]
    assert all(total <= packs.packing.length for total in packs.tokens.tolist())
    assert all(span == list(range(span[0], span[-1] + 1)) for span in spans), "neighboring tokens in their order"
    once = sorted(token for span in spans for token in span)
    assert len(set(once)) == len(once)
    learned = {token for _, completion in parts for token in completion}
    missing = set(range(sum(map(sum, rows)))) - set(once)
    if strategy == "bfd":
        assert not missing and sorted(map(len, spans)) == sorted(map(sum, rows))
    else:
        assert len(missing & learned) <= packs.left_out, "only the first token of a span, which cannot be predicted"


def test_complete_rows_are_not_split() -> None:
    packs, rows = packed(BFD)
    assert everything(rows) == [
        [([20, 21, 22, 23, 24, 25], [24, 25]), ([30, 31], [31])],
        [([0, 1, 2, 3, 4], [2, 3, 4])],
        [([10, 11, 12, 13], [11, 13])],
    ]
    assert packs.tokens.tolist() == [8, 5, 4] and packs.left_out == 0
    assert [packs.rows(number) for number in range(3)] == [[2, 3], [0], [1]]
    prompts, completions = packs.table.prompt, packs.table.completions
    assert completions.tolist() == [[3], [3], [2]] and (prompts + completions[:, 0]).tolist() == [8, 5, 4]


def test_long_rows_are_split() -> None:
    """The first half of row 2 has prompt tokens only and is omitted; so is a part with one token."""
    packs, rows = packed(Packing("bfd_split", 4))
    assert everything(rows) == [
        [([0, 1, 2, 3], [2, 3])],
        [([10, 11, 12, 13], [11, 13])],
        [([24, 25], [25]), ([30, 31], [31])],
    ]
    assert packs.left_out == 2, "20 to 23, and 4 alone"
    assert packs.table.completions.tolist() == [[2], [2], [2]]


def test_wrapped_rows_are_one_sequence() -> None:
    """The first token of row 3 is in the loss because another row precedes it; that of row 1 belongs to a prompt."""
    packs, rows = packed(Packing("wrapped", 7))
    assert everything(rows) == [
        [([0, 1, 2, 3, 4, 10, 11], [2, 3, 4, 11])],
        [([12, 13, 20, 21, 22, 23, 24], [13, 24])],
        [([25, 30, 31], [30, 31])],
    ]
    assert packs.table.completions.tolist() == [[4], [2], [2]]
    assert packs.rows(1) == [1, 2]
    assert packed(Packing("wrapped", 4))[0].left_out == 2, "13 to 22, and 31 alone"


def test_rows_are_packed_with_neighboring_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TOGETHER", 2)
    packs, rows = packed(Packing("bfd", 9))
    assert [packs.rows(number) for number in range(len(packs))] == [[0, 1], [2, 3]]
    assert [[ids for ids, _ in pack] for pack in everything(rows)] == [
        [[0, 1, 2, 3, 4], [10, 11, 12, 13]],
        [[20, 21, 22, 23, 24, 25], [30, 31]],
    ]
    wrapped, rows = packed(Packing("wrapped", 8))
    assert wrapped.tokens.tolist() == [8, 8], "the ninth token of each two rows is alone, and left out"


def test_rows_are_shuffled_before_they_are_packed() -> None:
    order = np.random.default_rng(5).permutation(4).tolist()
    packs, rows = packed(Packing("wrapped", 64, seed=5))
    assert order != [0, 1, 2, 3] and packs.rows(0) == [0, 1, 2, 3]
    (((ids, _),),) = everything(rows)
    assert list(dict.fromkeys(token // 10 for token in ids)) == order


def test_batches_contain_sequences() -> None:
    """Two packs on one rank with three sequences; each token is predicted from its own sequence."""
    packs, rows = packed(BFD)
    plan = evaluation_plan(packs.table, world_size=1, batch_size=2, seed=0, draw_partners=False)
    assert plan.counts.first_completion_tokens == 8 and plan.counts.sequence_tokens == 17 and plan.counts.rows == 3
    batch = COMPLETIONS.collate(rows, plan, 0, 0)
    sequences = batch.completions
    assert batch.rows == (0, 0, 1) and sequences.lengths.tolist() == [2, 1, 3] and sequences.longest == 6
    assert sequences.targets.tolist() == [24, 25, 31, 2, 3, 4] and sequences.tokens == 13
    before = sequences.inputs["input_ids"].flatten()[sequences.positions]
    assert before.tolist() == [23, 24, 30, 1, 2, 3]
    dealt = evaluation_plan(packs.table, world_size=4, batch_size=1, seed=0, draw_partners=False)
    idle = COMPLETIONS.collate(rows, dealt, 0, 3)
    assert idle.rows == () and idle.completions.tokens == 0, "three packs for four ranks"


def test_the_report_contains_the_utilization_of_packs() -> None:
    report = DataReport(4, 4, packs=3, pack_length=8, pack_tokens=17, pack_left_out=2)
    said = "truncated, 3 packs of up to 8 tokens, 71% full, 2 sequences without completion tokens omitted"
    assert report.summary().endswith(said)
    assert "pack" not in DataReport(4, 4).summary()


def test_packed_datasets_are_refused() -> None:
    packs = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [2, 1]}])
    with pytest.raises(DataError, match=r"^packs.json: the rows are already packed .*set packing: true"):
        arranged(packs, {}, COMPLETIONS, "packs.json")


def test_packing_options() -> None:
    def asked(**given: Any) -> tuple[Packing | None, Packing | None]:
        method = SFTMethod(SFTConfig("out", use_cpu=True, max_length=32, seed=9, **given))
        return method.packing(True), method.packing(False)

    assert asked() == (None, None)
    assert asked(packing=True) == (Packing("bfd", 32), Packing("bfd", 32))
    assert asked(packing=True, eval_packing=False, packing_strategy="bfd-requeue") == (Packing("bfd_split", 32), None)
    assert asked(eval_packing=True, packing_strategy="wrapped") == (None, Packing("wrapped", 32))
    assert asked(packing=True, shuffle_dataset=True)[0] == Packing("bfd", 32, 9)
