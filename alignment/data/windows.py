"""Plan the rows of each optimizer step, and assign them to ranks and forward passes.

The *window* is the global batch of one optimizer step: ``per_device_train_batch_size`` x
``gradient_accumulation_steps`` x ranks rows. An evaluation set is planned as a single window.

The plan of a window is a pure function of (seed, epoch, step, lengths), so every rank computes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from alignment.config.errors import OptionError

Rows = npt.NDArray[np.int64]
_CANDIDATES, _MOST_ROWS = 8, 2_000_000  # windows that are planned, and rows of the epochs that are searched
_PARTNERS, _ORDER = 1, 0  # separate random streams for two uses of the same (seed, epoch, step)
# The state that must be equal to resume from a saved position -> the options that determine it.
_CONTINUED = {
    "seed": "seed and data_seed",
    "rows": "the data and the lengths",
    "window": "batch size x accumulation x ranks",
    "stratify": "stratify_labels",
    "partners": "ref_placement",
}


@dataclass(frozen=True)
class RowTable:
    """The properties of the rows of a tokenized dataset that planning needs.

    Attributes:
        prompt: (R,) number of prompt tokens.
        completions: (R, C) number of completion tokens; C is 1 for single completions, 2 for pairs, 0 for prompts.
        labels: (R,) bool, or None for rows without labels.
        prompt_key: (R,) int64, equal for equal prompts, or None if no partners are drawn.
        max_length: maximum sequence length, to which mismatched completions are also truncated.
        scored: (R, C) number of scored completion tokens, or None if all are scored.
    """

    prompt: Rows
    completions: Rows
    labels: npt.NDArray[np.bool_] | None = None
    prompt_key: Rows | None = None
    max_length: int | None = None
    scored: Rows | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def longest(self) -> int:
        """The length of the longest possible sequence: of a row, or of its prompt with any mismatched completion."""
        rows = int((self.prompt + self.completions.max(axis=1, initial=0)).max(initial=0))
        if self.prompt_key is None:
            return rows
        mismatched = int(self.prompt.max(initial=0) + self.completions.max(initial=0))
        return mismatched if self.max_length is None else max(rows, min(mismatched, self.max_length))

    def tokens_of_a_row(self, shared: bool) -> int:
        """The largest number of tokens that the sequences of a row take in a micro-batch.

        Args:
            shared: whether they are computed without padding, and the prompt of a pair once.
        """
        if not shared:
            return self.longest * max(1, self.completions.shape[1])
        return max(self.longest, int((self.prompt + self.completions.sum(axis=1)).max(initial=0)))


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one rank in one forward pass. If empty, a dummy row is used.

    Attributes:
        rows: row IDs.
        partners: IDs of their KTO partners; -1: none.
        mismatched: number of tokens of the partner's completion that fit after the row's prompt; 0 without a partner.
    """

    rows: tuple[int, ...]
    partners: tuple[int, ...]
    mismatched: tuple[int, ...] = ()


@dataclass(frozen=True)
class WindowCounts:
    """Global counts of one window, the denominators of all means."""

    rows: int
    desirable: int
    partnered: int
    first_completion_tokens: int
    sequence_tokens: int


@dataclass(frozen=True)
class WindowPlan:
    """The plan of one optimizer step, or of an evaluation set.

    Attributes:
        epoch, step: index of the epoch, and of the window in it.
        micro_batches: ``[micro][rank]``; every rank has the same number.
        longest: ``[micro]`` largest number of scored tokens of matched completions on any rank in the forward pass.
        longest_mismatched: ``[micro]`` the same for mismatched completions.
        counts: global counts.
    """

    epoch: int
    step: int
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    longest: tuple[int, ...]
    longest_mismatched: tuple[int, ...]
    counts: WindowCounts

    @classmethod
    def of(cls, parts: Sequence[tuple[WindowPlan, int]]) -> WindowPlan:
        """Return a plan of micro-batches of plans, by their indices, with the counts of the first plan."""
        return replace(
            parts[0][0],
            micro_batches=tuple(plan.micro_batches[micro] for plan, micro in parts),
            longest=tuple(plan.longest[micro] for plan, micro in parts),
            longest_mismatched=tuple(plan.longest_mismatched[micro] for plan, micro in parts),
        )


def derangement(keys: Rows, rng: np.random.Generator) -> Rows:
    """Draw a partner for each position: a permutation without fixed points, with a different key if possible.

    Rows are shuffled, grouped by key in random order, and shifted by the size of the largest group: rows of one group
    are paired only if it has more than half of all rows, which no permutation can avoid. A single row gets -1.
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
    packs: bool = False,
    epoch: int = 0,
    step: int = 0,
) -> WindowPlan:
    """Split the rows of a window into micro-batches of similar lengths, longest first, distributed over the ranks.

    Args:
        table: lengths of the full dataset.
        rows, partners: (W,) row IDs; a partner is -1 for none.
        world_size: number of ranks.
        batch_size: rows per rank and forward pass.
        max_tokens: maximum number of tokens per rank and forward pass, which then determines the batch size.
        packs: whether these are computed without padding, and the prompt of a pair once.
        epoch, step: recorded in the plan.
    """
    targets, mismatched = table.completions if table.scored is None else table.scored, np.zeros_like(rows)
    if table.completions.shape[1]:
        mismatched = np.where(partners >= 0, table.completions[partners, 0], 0)
        if table.max_length is not None:
            mismatched = np.minimum(mismatched, np.maximum(table.max_length - table.prompt[rows], 0))
    longest_completion = np.maximum(table.completions[rows].max(axis=1, initial=0), mismatched)
    width = table.prompt[rows] + longest_completion
    unpadded = table.prompt[rows] + np.maximum(table.completions[rows].sum(axis=1), mismatched)
    order = np.lexsort((rows, -(width if max_tokens is None or not packs else unpadded)))
    micro_batches, longest, longest_mismatched = [], [], []
    start = 0
    while start < len(rows):
        per_rank = batch_size
        if max_tokens is not None and packs:
            sums = unpadded[order[start::world_size]].cumsum()  # the first rank has the longest rows
            per_rank = max(1, int(np.searchsorted(sums, max_tokens, side="right")))
        elif max_tokens is not None:
            per_rank = max(1, max_tokens // int(width[order[start]] * max(1, table.completions.shape[1])))
        group = order[start : start + per_rank * world_size]
        start += len(group)
        shares = [group[rank::world_size] for rank in range(world_size)]
        parts = [[tuple(values[s].tolist()) for values in (rows, partners, mismatched)] for s in shares]
        micro_batches.append(tuple(MicroBatch(*part) for part in parts))
        longest.append(max(int(targets[rows[s]].sum()) for s in shares))
        longest_mismatched.append(max(int(mismatched[s].sum()) for s in shares))
    counts = WindowCounts(
        rows=len(rows),
        desirable=0 if table.labels is None else int(table.labels[rows].sum()),
        partnered=int((partners >= 0).sum()),
        first_completion_tokens=int(targets[rows, :1].sum()),
        sequence_tokens=int((table.prompt[rows, None] + table.completions[rows]).sum()),
    )
    return WindowPlan(epoch, step, tuple(micro_batches), tuple(longest), tuple(longest_mismatched), counts)


@dataclass
class WindowSampler:
    """Plans the windows of a training run over all epochs; seeded, global and resumable.

    Attributes:
        table: lengths of the dataset.
        world_size, batch_size, accumulation: ranks, and rows and passes of each; their product is the window.
        seed: seed of the order and the partners.
        draw_partners: draw a partner for each row from its window (KTO).
        stratify: give every window the dataset's share of True labels, to within one row.
        sequential: keep the order of the data in every epoch.
        drop_last: skip the last window of an epoch if it is incomplete.
        max_tokens, packs: see :func:`plan_window`.
        partners: (R,) row IDs of fixed partners, such as those of :func:`set_partners`; None to draw new ones for
            every window.
        epoch, step: the position: the next window.
    """

    table: RowTable
    world_size: int
    batch_size: int
    accumulation: int
    seed: int
    draw_partners: bool = False
    stratify: bool = False
    sequential: bool = False
    drop_last: bool = False
    max_tokens: int | None = None
    packs: bool = False
    partners: Rows | None = None
    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.window, rows = self.batch_size * self.accumulation * self.world_size, len(self.table)
        self.steps_per_epoch = rows // self.window if self.drop_last else math.ceil(rows / self.window)
        self._order: tuple[int, Rows] | None = None

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self.seed, *stream]))

    def order(self, epoch: int) -> Rows:
        """Return the (R,) row IDs of one epoch in order."""
        if self._order is None or self._order[0] != epoch:
            rng = self._rng(_ORDER, epoch)
            rows = np.arange(len(self.table))
            rows = rows if self.sequential else rng.permutation(len(rows)).astype(np.int64)
            self._order = (epoch, self._stratified(rows, rng) if self.stratify else rows)
        return self._order[1]

    def _stratified(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Distribute each class evenly over the epoch, so that every part of it has the same ratio."""
        assert self.table.labels is not None
        labels = self.table.labels[rows]
        place = np.empty(len(rows))
        for value in (True, False):
            members = int((labels == value).sum())
            place[labels == value] = (np.arange(members) + 0.5) / max(members, 1)
        return rows[np.lexsort((rng.random(len(rows)), place))]

    def plan(self, epoch: int, step: int) -> WindowPlan:
        """Return the plan of window ``step`` of ``epoch``, which is the same on every rank and for every call."""
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
            packs=self.packs,
            epoch=epoch,
            step=step,
        )

    def largest(self, steps: int) -> WindowPlan:
        """Return the largest micro-batches of the next ``steps`` windows in one plan.

        It has the largest of those that are the first of their window, and the largest of all others, if there are
        any: they are computed beside the gradient of the first.
        """
        wide = self.batch_size * self.world_size
        found: list[list[tuple[int, int, int]]] = [[], []]  # tokens on the first rank if rows are equal, epoch, step
        tokens = self.table.prompt + self.table.completions.sum(axis=1)
        epoch, first = self.epoch, self.step
        while steps > 0 and epoch - self.epoch < max(1, _MOST_ROWS // max(1, len(self.table))):
            rows = self.order(epoch)[first * self.window : min(first + steps, self.steps_per_epoch) * self.window]
            sizes = np.zeros(-(-len(rows) // self.window) * self.window, dtype=np.int64)
            sizes[: len(rows)] = tokens[rows]
            windows = -np.sort(-sizes.reshape(-1, self.window), axis=1)
            for place, best in enumerate(found):
                sums = windows[:, place * wide : (place + 1) * wide : self.world_size].sum(axis=1)
                best += [(int(sums[n]), epoch, first + int(n)) for n in np.argsort(-sums)[:_CANDIDATES]]
                best[:] = sorted(best, reverse=True)[:_CANDIDATES]
            steps, epoch, first = steps - len(windows), epoch + 1, 0
        firsts, others = ([self.plan(epoch, step) for _, epoch, step in best] for best in found)
        candidates = [
            [(plan, 0) for plan in firsts],
            [(plan, micro) for plan in (*firsts, *others) for micro in range(1, len(plan.micro_batches))],
        ]

        def size(part: tuple[WindowPlan, int]) -> int:
            return micro_tokens(self.table, *part, self.packs)

        return WindowPlan.of([max(each, key=size) for each in candidates if each])

    def advance(self) -> None:
        """Advance to the next window."""
        self.step += 1
        if self.step >= self.steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run: the next window."""
        partners = "of the window" if self.partners is None else "of the whole set"
        position = {"epoch": self.epoch, "step": self.step, "rows": len(self.table), "partners": partners}
        return position | {"seed": self.seed, "window": self.window, "stratify": self.stratify}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position; OptionError if it is one of other data, or another seed, window or order."""
        own = self.state_dict()
        for key, options in _CONTINUED.items():
            if state[key] != own[key]:
                raise OptionError(
                    f"resume_from_checkpoint: {key} is {state[key]} in the checkpoint but {own[key]} in this run; set "
                    f"{options} as in the run that saved it"
                )
        self.epoch, self.step = int(state["epoch"]), int(state["step"])


def micro_tokens(table: RowTable, plan: WindowPlan, micro: int, packs: bool) -> int:
    """Return the largest number of tokens that a rank computes in a micro-batch of a plan.

    With ``packs``, neither padding nor the prompt of the second completion counts.
    """
    sizes, columns = [0], max(1, table.completions.shape[1])
    for rows in (list(share.rows) for share in plan.micro_batches[micro] if share.rows):
        prompts, completions = table.prompt[rows], table.completions[rows]
        widest = (prompts + completions.max(axis=1, initial=0)).max()
        sizes.append(int(prompts.sum() + completions.sum() if packs else widest * len(rows) * columns))
    return max(sizes)


def evaluation_plan(table: RowTable, *, seed: int, draw_partners: bool, **batches: Any) -> WindowPlan:
    """Plan an evaluation set as a single window, with partners drawn once from the whole set.

    ``batches`` are the arguments of :func:`plan_window` that determine micro-batches.
    """
    rows, partners = np.arange(len(table), dtype=np.int64), set_partners(table, seed, draw_partners)
    return plan_window(table, rows, partners, **batches)


def set_partners(table: RowTable, seed: int, draw: bool) -> Rows:
    """Return the (R,) partners of all rows, drawn from the whole set with ``seed``; -1 if ``draw`` is False."""
    if not draw:
        return np.full(len(table), -1, dtype=np.int64)
    assert table.prompt_key is not None
    return derangement(table.prompt_key, np.random.default_rng(np.random.SeedSequence([seed, _PARTNERS])))


def row_table(dataset: Dataset, completions: Sequence[str], max_length: int | None) -> RowTable:
    """Read lengths, labels and prompt keys of a tokenized dataset from Arrow, without decoding the tokens."""
    further = (name for name in ("label", "prompt_key", "scored") if name in dataset.column_names)
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in ("prompt_ids", *completions, *further)}
    # In pieces, because a dataset with sampled rows copies the rows that are read.
    for table in dataset.with_format("arrow").iter(10_000):
        for name, arrays in pieces.items():
            found = (pc.list_value_length(table[name]) if name.endswith("_ids") else table[name]).to_numpy()
            if name == "scored":
                found = _scored(table[name], pc.list_value_length(table[completions[0]]).to_numpy())
            arrays.append(found)
    columns = {name: np.concatenate(arrays) for name, arrays in pieces.items()}
    tokens = np.array([columns[name] for name in completions], dtype=np.int64)  # empty for prompts without completions
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
    """Return the (R,) number of scored tokens of each row: those in its mask, or all tokens without a mask."""
    rows, values = pc.list_parent_indices(masks).to_numpy(), pc.list_flatten(masks).to_numpy()
    counts = np.bincount(rows, weights=values, minlength=len(masks)).astype(np.int64)
    return np.where(pc.is_null(masks).to_numpy(), lengths, counts)
