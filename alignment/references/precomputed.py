"""A reference with precomputed log-probs instead of a model: every sequence is looked up by its row."""

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
    """The log-probs of a dataset.

    Attributes:
        values: (R, W) fp32 on the host: the completions of a row in order, then its prompt with the partner's.
        partners: (R,) row IDs, -1 for a row without a partner.
    """

    values: Tensor
    partners: Rows


def places(ids: RowIds, completions: int) -> tuple[Tensor, Tensor]:
    """Return the (S,) row and (S,) column in :attr:`LogpTable.values` of each sequence of a batch.

    Args:
        ids: the rows of the batch; sequences are ordered as in :class:`~alignment.references.base.RowIds`.
        completions: number of completions per row; the next column is the partner's.
    """
    partnered = [row for row, partner in zip(ids.rows, ids.partners) if partner >= 0]
    rows = torch.tensor([*ids.rows * completions, *partnered], dtype=torch.long)
    own = torch.arange(completions).repeat_interleave(len(ids.rows))
    return rows, torch.cat([own, torch.full((len(partnered),), completions)])


class PrecomputedReference:
    """Looks up log-probs of the rows of known datasets.

    Args:
        tables: tables by dataset name.
        completions: number of completions per row.
    """

    def __init__(self, tables: dict[str, LogpTable], completions: int) -> None:
        self.tables, self.completions = tables, completions

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """See :class:`~alignment.references.base.Reference`.

        Raises:
            RuntimeError: the dataset is unknown, or the rows have other partners. This is a bug, not a user error.
        """
        table = self.tables.get(ids.dataset)
        if table is None:
            raise RuntimeError(f"no reference log-probs were computed for the dataset {ids.dataset!r}")
        drawn, stored = np.array(ids.partners, dtype=np.int64), table.partners[list(ids.rows)]
        for row, partner, known in zip(ids.rows, drawn, stored):
            if partner not in (-1, known):
                raise RuntimeError(
                    f"row {row} has partner {partner}, but the stored log-probs are for partner {known}"
                )
        rows, columns = places(ids, self.completions)
        if len(rows) != len(batch.lengths):
            raise RuntimeError(
                f"the batch has {len(batch.lengths)} sequences, but {len(rows)} are stored for its rows"
            )
        return transferred([table.values[rows, columns]], device())[0]

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """Not supported, because only sums are stored.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "ref_placement='precomputed': this method needs the log-prob of each token, but only sums are stored; set "
            "ref_placement to offload, sharded or replica"
        )

    def close(self) -> None:
        """Release the tables."""
        self.tables = {}
