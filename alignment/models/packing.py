"""Whether the rows of a batch are packed sequences, which the device is asked only where it is not known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from alignment.internals.transformers import deciding_on_packing


class PackingCheck:
    """Lets transformers look at a model's positions until it is known that they cannot be those of packed sequences.

    Positions that all rows share are made of the shape alone, and so never of several sequences. A model that makes
    them of the tokens is looked at each time.

    Attributes:
        shared: whether that was seen of a forward of several rows.
    """

    def __init__(self) -> None:
        self.shared = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around a forward without an attention mask, and around its backward pass, which may compute it again."""
        with deciding_on_packing(self._decide, lambda: self.shared):
            yield

    def _decide(self, positions: Tensor, look: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        if self.shared:
            return None
        found = look(positions)
        self.shared = found is None and positions.shape[0] > 1 and positions.stride(0) == 0
        return found
