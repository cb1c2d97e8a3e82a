"""Compute the first of equal parts only, for a memory plan: tiles of the head and slices of MLPs.

All parts need the same memory, and a plan has no use for the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_within: list[bool] = []


@contextlib.contextmanager
def only_first_part() -> Iterator[None]:
    """Let :func:`is_enough` be true within this context."""
    _within.append(True)
    try:
        yield
    finally:
        _within.pop()


def is_enough() -> bool:
    """Return whether the first part is enough."""
    return bool(_within)
