"""Packs: stretches of the tokens of a dataset that take the place of its rows.

They are a function of the rows' lengths and of what is learned of them, so that every rank computes the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset

from alignment.data.packing.best_fit import best_fit
from alignment.data.packing.flat import COLUMNS, flat
from alignment.data.windows import Rows, RowTable

STRATEGIES = ("bfd", "bfd_split", "wrapped")
TOGETHER = 1000  # rows that are packed with one another: what TRL's map() hands over at a time


@dataclass(frozen=True)
class Packing:
    """How rows are packed.

    Attributes:
        strategy: ``bfd`` puts whole sequences into packs, ``bfd_split`` cuts longer ones into several before,
            ``wrapped`` cuts the tokens of all rows, one after another, wherever a pack is full.
        length: tokens of a pack at most.
        seed: of a permutation of the rows before they are packed; None for the order of the data.
    """

    strategy: str
    length: int
    seed: int | None = None

    @property
    def whole_rows(self) -> bool:
        """Whether it takes rows of any length, so that they must not be cut before."""
        return self.strategy != "bfd"


@dataclass(frozen=True)
class Packs:
    """N packs of S sequences, each a stretch of the tokens of all rows, put one after another.

    Attributes:
        packing: how they were made.
        order: (R,) the rows in the order in which their tokens stand.
        ends: (R,) where the tokens of each of them end.
        begins: (S,) where each sequence begins.
        stops: (S,) where it ends.
        scored: (S,) how many of its tokens are learned: never its first one, which nothing predicts.
        offsets: (N + 1,) the first sequence of each pack, and S.
        left_out: stretches of which nothing is learned.
    """

    packing: Packing
    order: Rows
    ends: Rows
    begins: Rows
    stops: Rows
    scored: Rows
    offsets: Rows
    left_out: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> Rows:
        """(N,) tokens of each pack."""
        return np.add.reduceat(self.stops - self.begins, self.offsets[:-1])

    @property
    def table(self) -> RowTable:
        """What planning needs to know of packs: tokens that are learned, and as ``prompt`` all others."""
        scored = np.add.reduceat(self.scored, self.offsets[:-1])
        return RowTable(prompt=self.tokens - scored, completions=scored[:, None], max_length=self.packing.length)

    def rows(self, pack: int) -> list[int]:
        """The rows that the tokens of a pack are of, each once."""
        first, last = self.span(np.arange(self.offsets[pack], self.offsets[pack + 1]))
        return sorted({int(row) for begin, end in zip(first, last) for row in self.order[begin : end + 1]})

    def span(self, sequences: Rows) -> tuple[Rows, Rows]:
        """The places in :attr:`order` of the first and of the last row of each sequence."""
        begins, stops = self.begins[sequences], self.stops[sequences]
        return np.searchsorted(self.ends, begins, side="right"), np.searchsorted(self.ends, stops, side="left")


def pack_rows(dataset: Dataset, packing: Packing) -> Packs:
    """Pack tokenised rows of prompt and completion.

    Args:
        dataset: the rows; for ``bfd`` of at most ``packing.length`` tokens each.
        packing: how.
    """
    count = len(dataset)
    order = np.arange(count) if packing.seed is None else np.random.default_rng(packing.seed).permutation(count)
    found: list[tuple[Rows, Rows, Rows]] = []
    sizes: list[int] = []
    lengths: list[Rows] = []
    left_out = base = 0
    for table in _pieces(dataset, None if packing.seed is None else order):
        rows = flat(table, ids=False)
        begins, stops = _stretches(rows.lengths, packing)
        scored = _scored(rows.learned, begins, stops)
        kept = scored > 0
        left_out += int((~kept).sum())
        begins, stops, scored = begins[kept], stops[kept], scored[kept]
        packs = _together(stops - begins, packing)
        chosen = np.array([number for pack in packs for number in pack], dtype=np.int64)
        found.append((base + begins[chosen], base + stops[chosen], scored[chosen]))
        sizes += map(len, packs)
        lengths.append(rows.lengths)
        base += len(rows.learned)
    begins, stops, scored = (np.concatenate(parts) for parts in zip(*found))
    return Packs(
        packing=packing,
        order=order,
        ends=np.cumsum(np.concatenate(lengths)),
        begins=begins,
        stops=stops,
        scored=scored,
        offsets=np.cumsum([0, *sizes]),
        left_out=left_out,
    )


def _pieces(dataset: Dataset, order: Rows | None) -> Iterator[pa.Table]:
    rows = dataset.select_columns(list(COLUMNS))
    rows = rows if order is None else rows.select(order)
    yield from rows.with_format("arrow").iter(TOGETHER)


def _stretches(lengths: Rows, packing: Packing) -> tuple[Rows, Rows]:
    """Where sequences begin and end in the tokens of some rows, put one after another."""
    ends = np.cumsum(lengths)
    if packing.strategy == "wrapped":
        begins = np.arange(0, int(lengths.sum()), packing.length)
        return begins, np.minimum(begins + packing.length, int(lengths.sum()))
    parts = -(-lengths // packing.length)
    if packing.strategy == "bfd":
        assert parts.max(initial=1) == 1, "rows are cut to the length of a pack before"
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = np.repeat(ends - lengths, parts) + number * packing.length
    return begins, np.minimum(begins + packing.length, np.repeat(ends, parts))


def _scored(learned: npt.NDArray[np.bool_], begins: Rows, stops: Rows) -> Rows:
    """(S,) how many tokens of each stretch are learned, its first one aside."""
    counts = np.concatenate(([0], np.cumsum(learned)))
    return counts[stops] - counts[begins + 1]


def _together(sizes: Rows, packing: Packing) -> list[list[int]]:
    if packing.strategy == "wrapped":
        return [[number] for number in range(len(sizes))]
    return best_fit(sizes, packing.length)
