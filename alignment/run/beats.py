"""Heartbeats: the state that each rank publishes twice a second, and how an observer evaluates it.

A heartbeat also carries stop requests, so that every rank learns of them within a second.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from alignment.run.activity import ACTIVITY
from alignment.run.processes import machine
from alignment.run.requests import REQUESTS, StopRequests
from alignment.run.stop import StopReason

_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")
_FRAMES = 12  # how many innermost frames may belong to a collective


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a rank.

    Attributes:
        count: sequence number.
        host, machine, pid: where the rank runs; ``machine`` is equal for processes that can see each other.
        phase, step: current activity.
        moves: progress counter.
        idle: seconds since the last progress.
        over: whether ``idle`` exceeds the limit of the phase.
        waiting: whether the main thread is in a collective.
        finished: whether the rank has finished its work.
        asked: the :class:`StopReason` that the rank knows of; 0 if there is none.
        asker: the rank that received the request, this one or another.
    """

    count: int
    host: str
    machine: str
    pid: int
    phase: str
    step: int
    moves: int
    idle: float
    over: bool
    waiting: bool
    finished: bool
    asked: int = 0
    asker: int = 0

    def text(self) -> str:
        """Serialize the heartbeat for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def parsed(cls, text: str | bytes) -> Beat:
        """Parse the result of :meth:`text`."""
        return cls(**json.loads(text))

    @property
    def place(self) -> str:
        """Phase and step, for messages."""
        return f"phase {self.phase}, step {self.step}"


class Pulse:
    """Produces the heartbeats of this process.

    Args:
        rank: rank of this process.
        requests: stop requests of this process.
    """

    def __init__(self, rank: int = 0, requests: StopRequests = REQUESTS) -> None:
        self.host, self.machine = socket.gethostname(), machine()
        self.count, self.finished = 0, False
        self._rank, self._requests = rank, requests
        self._heard: tuple[StopReason, int] | None = None  # a request on another rank, and that rank

    def beat(self) -> Beat:
        """Return the next heartbeat."""
        self.count += 1
        idle, limit, reason = ACTIVITY.idle, ACTIVITY.limit, self._requests.reason
        return Beat(
            count=self.count,
            host=self.host,
            machine=self.machine,
            pid=os.getpid(),
            phase=ACTIVITY.phase,
            step=ACTIVITY.step,
            moves=ACTIVITY.moves,
            idle=idle,
            over=idle > limit,
            waiting=in_collective(),
            finished=self.finished,
            asked=int(reason or 0),
            asker=self._heard[1] if self._heard is not None and self._heard[0] is reason else self._rank,
        )

    def heed(self, beat: Beat) -> None:
        """Adopt a stop request that another rank has received."""
        if beat.asked and self._requests.request(StopReason(beat.asked), f"received by rank {beat.asker}"):
            self._heard = StopReason(beat.asked), beat.asker


def in_collective() -> bool:
    """Whether the main thread is in a collective, judging by its Python stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False


class Heard:
    """When an observer last received a heartbeat from each rank, by its own clock.

    Args:
        clock: clock in seconds.
        awaited: ranks that are expected to send heartbeats.
        allowance: grace period before the first heartbeat, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, awaited: Iterable[int] = (), allowance: float = 0.0
    ) -> None:
        self._clock = clock
        self.beats: dict[int, Beat] = {}
        self._at: dict[int, float] = dict.fromkeys(awaited, clock() + allowance)

    def hear(self, beats: Mapping[int, Beat]) -> None:
        """Record heartbeats; one that is already known is ignored."""
        known, now = self.beats, self._clock()
        new = {rank: beat for rank, beat in beats.items() if rank not in known or known[rank].count != beat.count}
        # Other threads read both dicts, so they are replaced and never modified.
        self.beats, self._at = {**known, **new}, {**self._at, **dict.fromkeys(new, now)}

    def pardon(self, seconds: float) -> None:
        """Extend all deadlines by the time that the observer itself was suspended."""
        now = self._clock()
        self._at = {rank: max(at, min(now, at + seconds)) for rank, at in self._at.items()}

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have not sent a heartbeat for ``seconds``."""
        now = self._clock()
        return sorted(rank for rank, at in self._at.items() if now - at > seconds)


def hung_rank(beats: Mapping[int, Beat]) -> int | None:
    """The rank that blocks the job; None as long as any rank makes progress or is still within its limit.

    A rank that waits for others makes no progress either, so no rank is blamed before all of them exceed their limits.
    The blocking rank is the one that is not in a collective; among several, the one with the least progress.
    """
    working = {rank: beat for rank, beat in beats.items() if not beat.finished}
    if not working or not all(beat.over for beat in working.values()):
        return None
    return min(working, key=lambda rank: (working[rank].waiting, working[rank].moves, -working[rank].idle, rank))
