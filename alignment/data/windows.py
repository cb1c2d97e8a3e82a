"""Which rows make up each optimizer step, and which rank computes which of them in which forward.

The *window* is the global batch of one optimizer step: ``per_device_train_batch_size`` x
``gradient_accumulation_steps`` x ranks rows. A whole evaluation set is planned as one window.

The plan of a window is a pure function of (seed, epoch, step, lengths): every rank computes the same one. It is the
only source for collation, for the counts that means are divided by, for the number of schedule steps and for resuming.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from alignment.config.errors import OptionError

Rows = npt.NDArray[np.int64]
_PARTNERS, _ORDER = 1, 0  # separate random streams for two uses of the same (seed, epoch, step)
# What has to be equal for a run to go on from a saved position, and the options that decide it.
_CONTINUED = {
    "seed": "seed and data_seed",
    "rows": "the data and the lengths",
    "window": "batch size x accumulation x ranks",
    "stratify": "stratify_labels",
    "partners": "ref_placement",
}
_PIECE = 10_000  # rows whose lengths are read at a time


@dataclass(frozen=True)
class RowTable:
    """What planning needs to know of every row of a tokenised dataset.

    Attributes:
        prompt: (R,) prompt tokens.
        completions: (R, C) completion tokens; C is 1 for single answers, 2 for (chosen, rejected), 0 for prompts.
        labels: (R,) bool, or None where rows have none.
        prompt_key: (R,) int64, equal for equal prompts, or None where no partners are drawn.
        max_length: longest sequence, which also cuts a mismatched completion.
        scored: (R, C) how many of the completion tokens are scored, or None where all are.
    """

    prompt: Rows
    completions: Rows
    labels: npt.NDArray[np.bool_] | None = None
    prompt_key: Rows | None = None
    max_length: int | None = None
    scored: Rows | None = None

    @property
    def targets(self) -> Rows:
        """(R, C) scored completion tokens."""
        return self.completions if self.scored is None else self.scored

    def __len__(self) -> int:
        return len(self.prompt)

    def mismatched_completion(self, rows: Rows, partners: Rows) -> Rows:
        """Tokens that the partner's completion keeps behind each row's prompt (0 without a partner)."""
        if not self.completions.shape[1]:
            return np.zeros_like(rows)
        tokens = np.where(partners >= 0, self.completions[partners, 0], 0)
        if self.max_length is None:
            return tokens
        return np.minimum(tokens, np.maximum(self.max_length - self.prompt[rows], 0))


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward: row ids, their KTO partners (-1: none). Empty: a dummy row, weight 0."""

    rows: tuple[int, ...]
    partners: tuple[int, ...]


@dataclass(frozen=True)
class WindowCounts:
    """Global counts of one window, the denominators of every mean."""

    rows: int
    desirable: int
    partnered: int
    first_completion_tokens: int
    sequence_tokens: int


@dataclass(frozen=True)
class WindowPlan:
    """One optimizer step (or a whole evaluation set).

    Attributes:
        micro_batches: ``[micro][rank]``; every rank has equally many.
        longest: ``[micro]`` the largest number of matched completion tokens that any rank scores in that forward.
        longest_mismatched: the same for mismatched completions.
        counts: global counts.
    """

    epoch: int
    step: int
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    longest: tuple[int, ...]
    longest_mismatched: tuple[int, ...]
    counts: WindowCounts


def derangement(keys: Rows, rng: np.random.Generator) -> Rows:
    """Partner of each position: a permutation without fixed points, from a different key wherever there is one.

    Rows in random order, grouped by key with the groups in random order too, are shifted by the size of the largest
    group: a row then meets its own group only where that group is more than half of all, and then no permutation could
    do better. A single row gets -1.
    """
    count = len(keys)
    if count < 2:
        return np.full(count, -1, dtype=np.int64)
    shuffled = rng.permutation(count)
    _, group, sizes = np.unique(keys[shuffled], return_inverse=True, return_counts=True)
    order = shuffled[np.argsort(rng.permutation(len(sizes))[group], kind="stable")]
    shift = int(sizes.max())
    partners = np.empty(count, dtype=np.int64)
    partners[order] = np.roll(order, -(shift if shift < count else 1))
    return partners


def plan_window(
    table: RowTable,
    rows: Rows,
    partners: Rows,
    *,
    world_size: int,
    batch_size: int,
    max_tokens: int | None = None,
    epoch: int = 0,
    step: int = 0,
) -> WindowPlan:
    """Cut the rows of a window into micro-batches of similar lengths, the longest first, dealt to the ranks in turn.

    Args:
        table: lengths of the whole dataset.
        rows: (W,) row ids.
        partners: (W,) row ids, -1 for none.
        world_size: ranks.
        batch_size: rows per rank and forward.
        max_tokens: if given, rows per rank and forward follow from this many padded tokens instead.
        epoch: recorded in the plan.
        step: recorded in the plan.
    """
    mismatched = table.mismatched_completion(rows, partners)
    longest_completion = np.maximum(table.completions[rows].max(axis=1, initial=0), mismatched)
    width = table.prompt[rows] + longest_completion
    order = np.lexsort((rows, -width))
    micro_batches, longest, longest_mismatched = [], [], []
    start = 0
    while start < len(rows):
        per_rank = batch_size
        if max_tokens is not None:
            per_rank = max(1, max_tokens // int(width[order[start]] * max(1, table.completions.shape[1])))
        group = order[start : start + per_rank * world_size]
        start += len(group)
        shares = [group[rank::world_size] for rank in range(world_size)]
        micro_batches.append(tuple(MicroBatch(_ids(rows[s]), _ids(partners[s])) for s in shares))
        longest.append(max(int(table.targets[rows[s]].sum()) for s in shares))
        longest_mismatched.append(max(int(mismatched[s].sum()) for s in shares))
    counts = WindowCounts(
        rows=len(rows),
        desirable=0 if table.labels is None else int(table.labels[rows].sum()),
        partnered=int((partners >= 0).sum()),
        first_completion_tokens=int(table.targets[rows, :1].sum()),
        sequence_tokens=int((table.prompt[rows, None] + table.completions[rows]).sum()),
    )
    return WindowPlan(epoch, step, tuple(micro_batches), tuple(longest), tuple(longest_mismatched), counts)


def _ids(rows: Rows) -> tuple[int, ...]:
    return tuple(int(row) for row in rows)


class WindowSampler:
    """The windows of a training run, epoch after epoch: seeded, global, resumable.

    Args:
        table: lengths of the dataset.
        world_size: ranks.
        batch_size: ``per_device_train_batch_size``.
        accumulation: ``gradient_accumulation_steps``; the window is batch_size x accumulation x world_size rows.
        seed: of the order and of the partners.
        draw_partners: give each row a partner from its window (KTO).
        sequential: rows come as they are, in every epoch.
        stratify: every window holds the dataset's share of True labels to within one row.
        drop_last: leave out a last window that is not full.
        max_tokens: see :func:`plan_window`.
        partners: (R,) row ids of partners that stay the same in every window, such as those of
            :func:`set_partners`; None draws them anew for each.
    """

    def __init__(
        self,
        table: RowTable,
        *,
        world_size: int,
        batch_size: int,
        accumulation: int,
        seed: int,
        draw_partners: bool = False,
        stratify: bool = False,
        sequential: bool = False,
        drop_last: bool = False,
        max_tokens: int | None = None,
        partners: Rows | None = None,
    ) -> None:
        self.partners = partners
        self.table, self.world_size, self.batch_size, self.max_tokens = table, world_size, batch_size, max_tokens
        self.window = batch_size * accumulation * world_size
        self.seed, self.draw_partners, self.stratify, self.sequential = seed, draw_partners, stratify, sequential
        self.steps_per_epoch = len(table) // self.window if drop_last else math.ceil(len(table) / self.window)
        self.epoch, self.step = 0, 0
        self._order: tuple[int, Rows] | None = None

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self.seed, *stream]))

    def order(self, epoch: int) -> Rows:
        """(R,) the row ids of one epoch in their order."""
        if self._order is None or self._order[0] != epoch:
            rng = self._rng(_ORDER, epoch)
            count = len(self.table)
            rows = np.arange(count) if self.sequential else rng.permutation(count).astype(np.int64)
            self._order = (epoch, self._stratified(rows, rng) if self.stratify else rows)
        return self._order[1]

    def _stratified(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Spread each class evenly over the epoch, so that any stretch of it has the ratio of the whole."""
        assert self.table.labels is not None
        labels = self.table.labels[rows]
        place = np.empty(len(rows))
        for value in (True, False):
            members = int((labels == value).sum())
            place[labels == value] = (np.arange(members) + 0.5) / max(members, 1)
        return rows[np.lexsort((rng.random(len(rows)), place))]

    def plan(self, epoch: int, step: int) -> WindowPlan:
        """The plan of window ``step`` of ``epoch``; the same on every rank and at every call."""
        rows = self.order(epoch)[step * self.window : (step + 1) * self.window]
        partners = np.full(len(rows), -1, dtype=np.int64)
        if self.partners is not None:
            partners = self.partners[rows]
        elif self.draw_partners:
            assert self.table.prompt_key is not None
            local = derangement(self.table.prompt_key[rows], self._rng(_PARTNERS, epoch, step))
            partners = np.where(local >= 0, rows[local], -1)
        return plan_window(
            self.table,
            rows,
            partners,
            world_size=self.world_size,
            batch_size=self.batch_size,
            max_tokens=self.max_tokens,
            epoch=epoch,
            step=step,
        )

    def advance(self) -> None:
        """Move on by one window."""
        self.step += 1
        if self.step >= self.steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: the window to be computed next."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "rows": len(self.table),
            "window": self.window,
            "stratify": self.stratify,
            "partners": "of the window" if self.partners is None else "of the whole set",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            OptionError: the state belongs to other data, another seed, another window or another order.
        """
        own = self.state_dict()
        for key, options in _CONTINUED.items():
            if state[key] != own[key]:
                raise OptionError(
                    f"resume_from_checkpoint: its {key} is {state[key]}, this run's is {own[key]}; set {options} "
                    "as in the run that saved it"
                )
        self.epoch, self.step = int(state["epoch"]), int(state["step"])


def evaluation_plan(
    table: RowTable, *, world_size: int, batch_size: int, seed: int, draw_partners: bool, max_tokens: int | None = None
) -> WindowPlan:
    """A whole evaluation set as one window, its partners drawn once over all of it."""
    rows, partners = np.arange(len(table), dtype=np.int64), set_partners(table, seed, draw_partners)
    return plan_window(table, rows, partners, world_size=world_size, batch_size=batch_size, max_tokens=max_tokens)


def set_partners(table: RowTable, seed: int, draw: bool) -> Rows:
    """(R,) each row's partner in the whole set, a function of the seed; -1 for a single row or where none is drawn."""
    if not draw:
        return np.full(len(table), -1, dtype=np.int64)
    assert table.prompt_key is not None
    return derangement(table.prompt_key, np.random.default_rng(np.random.SeedSequence([seed, _PARTNERS])))


def row_table(dataset: Dataset, completions: Sequence[str], max_length: int | None) -> RowTable:
    """Lengths, labels and prompt keys of a tokenised dataset, read from Arrow without decoding the tokens."""
    further = (name for name in ("label", "prompt_key", "scored") if name in dataset.column_names)
    wanted = ["prompt_ids", *completions, *further]
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    # In pieces: a dataset of drawn rows copies what it is asked for.
    for table in dataset.with_format("arrow").iter(_PIECE):
        for name, arrays in pieces.items():
            column = table[name]
            if name == "scored":
                arrays.append(_scored(column, pc.list_value_length(table[completions[0]]).to_numpy()))
                continue
            lengths = pc.list_value_length(column) if name.endswith("_ids") else column
            arrays.append(lengths.to_numpy())
    columns = {name: np.concatenate(arrays) for name, arrays in pieces.items()}
    tokens = np.array([columns[name] for name in completions], dtype=np.int64)  # none, for rows of prompts alone
    scored = columns.get("scored")
    return RowTable(
        scored=None if scored is None or (scored == tokens[0]).all() else scored[:, None],
        prompt=columns["prompt_ids"].astype(np.int64),
        completions=tokens.reshape(len(completions), len(dataset)).T,
        labels=columns.get("label"),
        prompt_key=columns.get("prompt_key"),
        max_length=max_length,
    )


def _scored(masks: pa.ChunkedArray, lengths: Rows) -> Rows:
    """(R,) how many tokens of each row are scored: by its mask, or all of them where it has none."""
    rows, values = pc.list_parent_indices(masks).to_numpy(), pc.list_flatten(masks).to_numpy()
    counts = np.bincount(rows, weights=values, minlength=len(masks)).astype(np.int64)
    return np.where(pc.is_null(masks).to_numpy(), lengths, counts)
