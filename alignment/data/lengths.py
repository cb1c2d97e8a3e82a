"""How long the rows of a tokenised dataset are: what a window is planned from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

from alignment.data.windows import RowTable

_PIECE = 10_000  # rows whose lengths are read at a time


def row_table(dataset: Dataset, completions: Sequence[str], max_length: int | None) -> RowTable:
    """Lengths, labels and prompt keys of a tokenised dataset, read from Arrow without decoding the tokens."""
    wanted = ["prompt_ids", *completions, *(n for n in ("label", "prompt_key") if n in dataset.column_names)]
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    # In pieces: a dataset of drawn rows copies what it is asked for.
    for table in dataset.with_format("arrow").iter(_PIECE):
        for name, arrays in pieces.items():
            column = table[name]
            lengths = pc.list_value_length(column) if name.endswith("_ids") else column
            arrays.append(lengths.to_numpy())
    columns = {name: np.concatenate(arrays) for name, arrays in pieces.items()}
    tokens = np.array([columns[name] for name in completions], dtype=np.int64)  # none, for rows of prompts alone
    return RowTable(
        prompt=columns["prompt_ids"].astype(np.int64),
        completions=tokens.reshape(len(completions), len(dataset)).T,
        labels=columns.get("label"),
        prompt_key=columns.get("prompt_key"),
        max_length=max_length,
    )
