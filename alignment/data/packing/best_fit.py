"""Which sequences go into which pack."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Best-fit decreasing: the longest sequence first, each into the pack that it leaves the least room in.

    Of sequences of one length the earlier one comes first, and of packs with the same room the one that has had it for
    longest, so that the result is a function of the lengths alone. With L different rooms at a time and S sequences,
    it takes O(S log S + S log L) comparisons. Source: https://arxiv.org/abs/2404.10830.

    Args:
        lengths: (S,) each of at most ``room`` tokens, and of one at least.
        room: tokens of a pack.

    Returns:
        For each pack the numbers of its sequences, in the order in which they were put there.
    """
    packs: list[list[int]] = []
    waiting: dict[int, deque[list[int]]] = defaultdict(deque)  # packs by the room that they have left
    rooms: list[int] = []  # those of them, rising
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
