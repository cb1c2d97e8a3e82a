"""Detect packed sequences without a device synchronization in every forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from alignment.internals.transformers import deciding_on_packing


class PackingCheck:
    """Lets transformers inspect a model's positions until they are known not to depend on the tokens.

    Positions that are expanded over the rows are derived from the shape alone, so they never describe packed
    sequences. If a model derives them from the tokens, they are inspected in every forward pass.

    Attributes:
        shared: whether a forward pass with several rows had the same positions for all of them.
    """

    def __init__(self) -> None:
        self.shared = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Wrap a forward pass without an attention mask, and its backward pass, which may recompute it."""
        with deciding_on_packing(self._decide, lambda: self.shared):
            yield

    def _decide(self, positions: Tensor, look: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        if self.shared:
            return None
        found = look(positions)
        self.shared = found is None and positions.shape[0] > 1 and positions.stride(0) == 0
        return found
