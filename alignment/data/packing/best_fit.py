"""Assign sequences to packs."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Best-fit decreasing: add sequences, longest first, to the pack in which they leave the least space.

    Ties are broken by the order of the sequences, and by the time for which packs have had the same space left, so the
    result is a function of the lengths alone. With S sequences and L distinct amounts of remaining space, it takes
    O(S log S + S log L) comparisons. Source: https://arxiv.org/abs/2404.10830.

    Args:
        lengths: (S,) lengths between 1 and ``room`` tokens.
        room: capacity of a pack in tokens.

    Returns:
        The indices of the sequences of each pack, in the order in which they were added.
    """
    packs: list[list[int]] = []
    waiting: dict[int, deque[list[int]]] = defaultdict(deque)  # packs by remaining space
    rooms: list[int] = []  # the keys of ``waiting``, ascending
    sizes = np.asarray(lengths, dtype=np.int64)
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect.bisect_left(rooms, size)
        if place < len(rooms):
            left = rooms[place]
            pack = waiting[left].popleft()
            if not waiting[left]:
                del rooms[place]
        else:
            left, pack = room, []
            packs.append(pack)
        pack.append(number)
        left -= size
        if left:
            if not waiting[left]:
                bisect.insort(rooms, left)
            waiting[left].append(pack)
    return packs
