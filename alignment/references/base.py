"""The interface of references: log-probs of the sequences of a batch, which may be looked up by row."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from alignment.data.batching import Batch


class RowIds(NamedTuple):
    """The rows from which the sequences of a batch were made, for references that store log-probs.

    A row has one sequence for each of its completions, and another one if it has a partner: its own prompt with the
    partner's completion. The sequences of a batch are in this order: the first completion of every row, the second one
    of every row, and so on, followed by those with partners.

    Attributes:
        dataset: name of the tokenized dataset; ``""`` for completions that are not in a dataset.
        rows: (R,) row IDs in the dataset.
        partners: (R,) row IDs of KTO's partners, -1 for a row without one; empty for methods without partners.
    """

    dataset: str
    rows: tuple[int, ...]
    partners: tuple[int, ...] = ()


class Reference(Protocol):
    """Log-probs of a frozen model. All ranks must make the same number of calls."""

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """Return (S,) fp32 summed completion log-probs on the policy's device, detached."""
        ...

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """Return (N,) fp32 log-probs of the completion tokens in the order of ``batch.targets``, detached."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...
