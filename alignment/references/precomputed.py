"""A reference that keeps log-probs instead of a model: every sequence is looked up by its row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.data.batching import Batch
from alignment.data.transfer import transferred
from alignment.engines.collectives import device
from alignment.references.base import RowIds
from alignment.references.store import Rows


@dataclass(frozen=True)
class LogpTable:
    """What is known of a dataset.

    Attributes:
        values: (R, W) fp32 on the host: a row's completions in their order, then its prompt with its partner's.
        partners: (R,) row ids, -1 for a row without one.
    """

    values: Tensor
    partners: Rows


def places(ids: RowIds, completions: int) -> tuple[Tensor, Tensor]:
    """(S,) row and (S,) column in :attr:`LogpTable.values` of each sequence that ``ids`` are of.

    Args:
        ids: of a batch; their order of sequences is that of :class:`~alignment.references.base.RowIds`.
        completions: how many each row has; partners' stand in the column behind them.
    """
    partnered = [row for row, partner in zip(ids.rows, ids.partners) if partner >= 0]
    rows = torch.tensor([*ids.rows * completions, *partnered], dtype=torch.long)
    own = torch.arange(completions).repeat_interleave(len(ids.rows))
    return rows, torch.cat([own, torch.full((len(partnered),), completions)])


class PrecomputedReference:
    """Answers about the rows of known datasets.

    Args:
        tables: by the name of the dataset.
        completions: of each row.
    """

    def __init__(self, tables: dict[str, LogpTable], completions: int) -> None:
        self.tables, self.completions = tables, completions

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says.

        Raises:
            RuntimeError: the batch is of another dataset, or its rows have other partners: a defect, not a user error.
        """
        table = self.tables.get(ids.dataset)
        if table is None:
            raise RuntimeError(f"no reference log-probs were computed for the dataset {ids.dataset!r}")
        drawn, stored = np.array(ids.partners, dtype=np.int64), table.partners[list(ids.rows)]
        for row, partner, known in zip(ids.rows, drawn, stored):
            if partner not in (-1, known):
                raise RuntimeError(f"row {row} was given the partner {partner}; the stored log-probs are for {known}")
        rows, columns = places(ids, self.completions)
        if len(rows) != len(batch.lengths):
            raise RuntimeError(f"{len(batch.lengths)} sequences were asked for, {len(rows)} are stored for their rows")
        return transferred([table.values[rows, columns]], device())[0]

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """Refused: sums are all that is kept.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "ref_placement='precomputed': this method asks for the log-prob of each token, and only sums are stored; "
            "set ref_placement to offload, sharded or replica"
        )

    def close(self) -> None:
        """Let go of the tables."""
        self.tables = {}
