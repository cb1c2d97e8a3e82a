"""How ranks hear of each other: beats over the process group's store.

Each rank sets its own. The first rank reads those of all, the others read the first one's, and once, when all have
come, where every rank runs; so traffic grows with the number of ranks and no faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from alignment.engines.watch.beats import Beat, Heard, Pulse
from alignment.engines.watch.neighbours import Neighbours

_ALL = "everyone"  # the key under which the first rank says where each rank runs


class Exchange:
    """One rank's part in it.

    Args:
        call: a method of the store, by its name and arguments.
        rank, world_size: this rank, and how many there are.
        pulse: of this process.
        heard: where beats of other ranks go.
        neighbours: where ranks of this machine go.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        rank: int,
        world_size: int,
        pulse: Pulse,
        heard: Heard,
        neighbours: Neighbours,
    ) -> None:
        self._call, self.rank, self.world_size = call, rank, world_size
        self._pulse, self._heard, self._neighbours = pulse, heard, neighbours
        self.met = False

    def turn(self) -> None:
        """Beat, and hear the beats of those that this rank listens to."""
        self._call("set", f"beat/{self.rank}", self._pulse.beat().text())
        known = self._heard.beats
        listens = range(self.world_size) if self.rank == 0 else [0]
        come = [other for other in listens if other in known or self._call("check", [f"beat/{other}"])]
        beats = self.read(come)
        self._heard.hear(beats)
        for beat in beats.values():
            self._pulse.heed(beat)
        if not self.met:
            self._meet()

    def read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """The last beats of ranks that have sent one."""
        texts = self._call("multi_get", [f"beat/{other}" for other in ranks]) if ranks else []
        return {other: Beat.parsed(text) for other, text in zip(ranks, texts, strict=True)} if texts else {}

    def _meet(self) -> None:
        """Once all have come, learn which of them run on this machine."""
        if self.rank == 0:
            if len(self._heard.beats) < self.world_size:
                return
            beats = [self._heard.beats[other] for other in range(self.world_size)]
            self._call("set", _ALL, json.dumps([[beat.machine, beat.pid] for beat in beats]))
        if not self._call("check", [_ALL]):
            return
        text = self._call("get", _ALL)
        if text is None:
            return
        everyone = enumerate(json.loads(text))
        here = {other: pid for other, (machine, pid) in everyone if machine == self._pulse.machine}
        here.pop(self.rank, None)
        self._neighbours.begin(here)
        self.met = True
