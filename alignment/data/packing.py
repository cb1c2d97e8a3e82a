"""Packing: several rows combined into one sequence. Packs are spans of the tokens of a dataset, and replace its rows.

They are a function of the rows' lengths and loss masks, so that every rank computes the same packs.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from alignment.data.windows import Rows, RowTable

COLUMNS = ("prompt_ids", "completion_ids", "scored", "first")
STRATEGIES = ("bfd", "bfd_split", "wrapped")
TOGETHER = 1000  # number of rows that are packed together: the batch size of TRL's map()


@dataclass(frozen=True)
class Packing:
    """How rows are packed.

    Attributes:
        strategy: ``bfd`` packs complete sequences, ``bfd_split`` first splits long sequences, ``wrapped`` concatenates
            all rows and splits the tokens wherever a pack is full.
        length: maximum number of tokens of a pack.
        seed: seed for shuffling the rows before packing; None to keep the order of the data.
    """

    strategy: str
    length: int
    seed: int | None = None

    @property
    def whole_rows(self) -> bool:
        """Whether the strategy supports rows of any length, so that they are not truncated before packing."""
        return self.strategy != "bfd"


@dataclass(frozen=True)
class Packs:
    """N packs of S sequences, each a span of the concatenated tokens of all rows.

    Attributes:
        packing: how the rows were packed.
        order: (R,) the order of the rows in the concatenation.
        ends: (R,) end offset of each row, in this order.
        begins: (S,) start offset of each sequence.
        stops: (S,) end offset of each sequence.
        scored: (S,) number of its tokens in the loss; never includes the first one, which cannot be predicted.
        offsets: (N + 1,) index of the first sequence of each pack, followed by S.
        left_out: number of omitted spans without loss tokens.
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
        """(N,) number of tokens of each pack."""
        return np.add.reduceat(self.stops - self.begins, self.offsets[:-1])

    @property
    def table(self) -> RowTable:
        """The table for planning: ``completions`` counts the tokens in the loss, ``prompt`` all others."""
        scored = np.add.reduceat(self.scored, self.offsets[:-1])
        return RowTable(prompt=self.tokens - scored, completions=scored[:, None], max_length=self.packing.length)

    def rows(self, pack: int) -> list[int]:
        """Return the rows that contribute tokens to a pack, without duplicates."""
        first, last = self.span(np.arange(self.offsets[pack], self.offsets[pack + 1]))
        return sorted({int(row) for begin, end in zip(first, last) for row in self.order[begin : end + 1]})

    def span(self, sequences: Rows) -> tuple[Rows, Rows]:
        """Return the positions in :attr:`order` of the first and the last row of each sequence."""
        begins, stops = self.begins[sequences], self.stops[sequences]
        return np.searchsorted(self.ends, begins, side="right"), np.searchsorted(self.ends, stops, side="left")


def pack_rows(dataset: Dataset, packing: Packing) -> Packs:
    """Pack tokenized rows of prompt and completion.

    Args:
        dataset: the rows; at most ``packing.length`` tokens each for ``bfd``.
        packing: how to pack them.
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
    """Return the start and end offsets of sequences in the concatenated tokens of rows."""
    ends = np.cumsum(lengths)
    if packing.strategy == "wrapped":
        begins = np.arange(0, int(lengths.sum()), packing.length)
        return begins, np.minimum(begins + packing.length, int(lengths.sum()))
    parts = -(-lengths // packing.length)
    if packing.strategy == "bfd":
        assert parts.max(initial=1) == 1, "rows must be truncated to the length of a pack"
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = np.repeat(ends - lengths, parts) + number * packing.length
    return begins, np.minimum(begins + packing.length, np.repeat(ends, parts))


def _scored(learned: npt.NDArray[np.bool_], begins: Rows, stops: Rows) -> Rows:
    """Return the (S,) number of loss tokens of each span, excluding its first token."""
    counts = np.concatenate(([0], np.cumsum(learned)))
    return counts[stops] - counts[begins + 1]


def _together(sizes: Rows, packing: Packing) -> list[list[int]]:
    if packing.strategy == "wrapped":
        return [[number] for number in range(len(sizes))]
    return best_fit(sizes, packing.length)


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Best-fit decreasing: add sequences, longest first, to the pack in which they leave the least space.

    Ties are broken by the order of the sequences, and by the time for which packs have had the same space left, so the
    result is a function of the lengths alone. With S sequences and L distinct amounts of remaining space, it takes
    O(S log S + S log L) comparisons. Source: https://arxiv.org/abs/2404.10830.

    Args:
        lengths: (S,) lengths between 1 and ``room`` tokens.
        room: capacity of a pack in tokens.

    Returns:
        The indices of the sequences of each pack, in the order in which they were added.
    """
    packs: list[list[int]] = []
    waiting: dict[int, deque[list[int]]] = defaultdict(deque)  # packs by remaining space
    rooms: list[int] = []  # the keys of ``waiting``, ascending
    sizes = np.asarray(lengths, dtype=np.int64)
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect.bisect_left(rooms, size)
        if place < len(rooms):
            left = rooms[place]
            pack = waiting[left].popleft()
            if not waiting[left]:
                del rooms[place]
        else:
            left, pack = room, []
            packs.append(pack)
        pack.append(number)
        left -= size
        if left:
            if not waiting[left]:
                bisect.insort(rooms, left)
            waiting[left].append(pack)
    return packs


@dataclass(frozen=True)
class Flat:
    """The concatenated tokens of rows.

    Attributes:
        lengths: (R,) number of tokens of each row.
        learned: (T,) bool loss mask; the value for a row's first token is only used if another row precedes it.
        ids: (T,) int64 token IDs; empty unless requested.
    """

    lengths: Rows
    learned: npt.NDArray[np.bool_]
    ids: Rows

    @property
    def ends(self) -> Rows:
        """(R,) end offset of each row."""
        return np.cumsum(self.lengths)


def flat(table: pa.Table, *, ids: bool) -> Flat:
    """Concatenate the rows of ``table``.

    Args:
        table: R tokenized rows with the columns :data:`COLUMNS`.
        ids: whether to return the token IDs.
    """
    prompt, completion = (_lengths(table[name]) for name in ("prompt_ids", "completion_ids"))
    lengths = prompt + completion
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    answered = np.arange(total) - np.repeat(starts, lengths) >= np.repeat(prompt, lengths)
    learned = answered.copy()
    masks = table["scored"]
    masked = np.repeat(~pc.is_null(masks).to_numpy(), lengths)
    learned[answered & masked] = pc.list_flatten(masks).to_numpy()
    learned[starts[prompt > 0]] |= table["first"].to_numpy()[prompt > 0]
    tokens = np.zeros(total if ids else 0, dtype=np.int64)
    if ids:
        tokens[~answered] = pc.list_flatten(table["prompt_ids"]).to_numpy()
        tokens[answered] = pc.list_flatten(table["completion_ids"]).to_numpy()
    return Flat(lengths, learned, tokens)


def _lengths(column: pa.ChunkedArray) -> Rows:
    return pc.list_value_length(column).to_numpy().astype(np.int64)
