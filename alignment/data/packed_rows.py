"""Read packs from tokenized rows on access, for batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from alignment.data.packing import COLUMNS, Packs, flat
from alignment.data.targets import divided


class Stretch(NamedTuple):
    """A sequence of a pack: (T,) token IDs and (T,) loss mask."""

    pack: int
    ids: list[int]
    learned: list[bool]


class PackedRows:
    """The packs of a dataset, with the interface of its rows.

    Args:
        dataset: tokenized rows of prompt and completion.
        packs: the packs.
    """

    def __init__(self, dataset: Dataset, packs: Packs) -> None:
        self.packs = packs
        self._rows = dataset.select_columns(list(COLUMNS)).with_format("arrow")

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return ``prompt_ids``, ``completion_ids``, ``scored`` and ``pack`` for each sequence of the packs."""
        found: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "scored", "pack")}
        for sequence in self.sequences(numbers):
            parts = divided(sequence.ids, sequence.learned)
            values = (parts.prompt, parts.completions[0], parts.further["scored"], sequence.pack)
            for name, value in zip(found, values):
                found[name].append(value)
        return found

    def sequences(self, numbers: Sequence[int]) -> Iterator[Stretch]:
        """Yield the sequences of the packs, pack by pack."""
        packs = self.packs
        owners = [pack for pack in numbers for _ in range(packs.offsets[pack], packs.offsets[pack + 1])]
        chosen = np.array([s for p in numbers for s in range(packs.offsets[p], packs.offsets[p + 1])], dtype=np.int64)
        if not len(chosen):
            return
        firsts, lasts = packs.span(chosen)
        places = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(firsts, lasts)]))
        rows = flat(self._rows[packs.order[places].tolist()], ids=True)
        own = rows.ends - rows.lengths  # start offsets of the rows among the rows read
        there = packs.ends[places] - rows.lengths  # and among all rows
        at = dict(zip(places.tolist(), range(len(places))))
        for owner, number, first in zip(owners, chosen, firsts):
            # The rows of a sequence are contiguous in both, so a span is a span in both.
            begin = int(packs.begins[number] - there[at[int(first)]] + own[at[int(first)]])
            stop = begin + int(packs.stops[number] - packs.begins[number])
            yield Stretch(owner, rows.ids[begin:stop].tolist(), rows.learned[begin:stop].tolist())
