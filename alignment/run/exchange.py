"""Exchange of heartbeats over the process group's store.

Each rank publishes its own. Rank 0 reads those of all ranks; the others read rank 0's and, once all ranks have joined,
the list of where every rank runs. The traffic therefore grows linearly with the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from alignment.run.beats import Beat, Heard, Pulse
from alignment.run.neighbors import Neighbors

_ALL = "everyone"  # the key under which rank 0 publishes where each rank runs


class Exchange:
    """One rank's side of the exchange.

    Args:
        call: calls a method of the store, given its name and arguments.
        rank, world_size: this rank and the number of ranks.
        pulse: produces this process's heartbeats.
        heard: receives the heartbeats of other ranks.
        neighbors: receives the ranks of this machine.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        rank: int,
        world_size: int,
        pulse: Pulse,
        heard: Heard,
        neighbors: Neighbors,
    ) -> None:
        self._call, self.rank, self.world_size = call, rank, world_size
        self._pulse, self._heard, self._neighbors = pulse, heard, neighbors
        self.met = False

    def turn(self) -> None:
        """Publish a heartbeat and read those of the ranks that this one listens to."""
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
        """The latest heartbeats of ranks that have sent one."""
        texts = self._call("multi_get", [f"beat/{other}" for other in ranks]) if ranks else []
        return {other: Beat.parsed(text) for other, text in zip(ranks, texts, strict=True)} if texts else {}

    def _meet(self) -> None:
        """Once all ranks have joined, find out which of them run on this machine."""
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
        self._neighbors.begin(here)
        self.met = True
