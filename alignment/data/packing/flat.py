"""Concatenate tokenized rows of prompt and completion, with their loss masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from alignment.data.windows import Rows

COLUMNS = ("prompt_ids", "completion_ids", "scored", "first")


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
