"""What a method asks of a reference: log-probs of the sequences of a batch, which it may know by their rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from alignment.data.batching import Batch


class RowIds(NamedTuple):
    """Which rows the sequences of a batch are made of, for references that keep log-probs instead of a model.

    A row has one sequence for each of its completions, and one more if it has a partner: its own prompt with the
    partner's completion. The sequences of a batch are in this order: the first completion of every row, the second of
    every row, and so on, then those with partners.

    Attributes:
        dataset: names the tokenised dataset; ``""`` for completions that are in no dataset.
        rows: (R,) row numbers in it.
        partners: (R,) row numbers of KTO's partners, -1 for a row without one; empty for methods that draw none.
    """

    dataset: str
    rows: tuple[int, ...]
    partners: tuple[int, ...] = ()


class Reference(Protocol):
    """A frozen model's log-probs. Every rank asks equally often."""

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """(S,) fp32 sums of completion log-probs on the policy's device, without a graph."""
        ...

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """(N,) fp32 log-probs of the completion tokens in the order of ``batch.targets``, without a graph."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...
