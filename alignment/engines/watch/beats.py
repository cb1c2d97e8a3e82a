"""Signs of life: what each rank says of itself twice a second, and what an observer makes of it.

A beat also says who has asked for a stop, so that every rank knows of it within a second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from alignment.engines.checkpoints.owner import Owner
from alignment.engines.watch.requests import REQUESTS, StopRequests
from alignment.engines.watch.stop import StopReason
from alignment.reporting.activity import ACTIVITY

_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")
_FRAMES = 12  # how far up the stack a collective's own frames reach


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        count: grows with each one.
        host, machine, pid: where it runs; ``machine`` is the same for processes that can see each other.
        phase, step: what it is doing.
        moves: progress that it has made, as a count.
        idle: seconds since the last of it.
        over: whether that is longer than the phase allows.
        waiting: whether its main thread is in a collective.
        finished: whether it has done its work.
        asked: what asked it to stop, a :class:`StopReason`; 0 if nothing did.
        asker: the rank that was asked, this one or another that it has heard of.
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
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def parsed(cls, text: str | bytes) -> Beat:
        """What :meth:`text` gave."""
        return cls(**json.loads(text))

    @property
    def place(self) -> str:
        """For messages: phase and step."""
        return f"phase {self.phase}, step {self.step}"


class Pulse:
    """Makes the beats of this process.

    Args:
        rank: of this process.
        requests: what it was asked.
    """

    def __init__(self, rank: int = 0, requests: StopRequests = REQUESTS) -> None:
        own = Owner.this_process()
        self.host, self.machine = own.host, f"{own.host}/{own.boot}/{own.space}"
        self.count, self.finished = 0, False
        self._rank, self._requests = rank, requests
        self._heard: tuple[StopReason, int] | None = None  # what another rank was asked, and which

    def beat(self) -> Beat:
        """The next one."""
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
        """What another rank was asked, this one was asked as well."""
        if beat.asked and self._requests.request(StopReason(beat.asked), f"rank {beat.asker} was asked"):
            self._heard = StopReason(beat.asked), beat.asker


def in_collective() -> bool:
    """Whether the main thread waits in a collective, as far as its Python stack tells."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False


class Heard:
    """When an observer heard of each rank last, by its own clock.

    Args:
        clock: in seconds.
        awaited: ranks that are to be heard of.
        allowance: seconds that they have before their silence counts.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, awaited: Iterable[int] = (), allowance: float = 0.0
    ) -> None:
        self._clock = clock
        self.beats: dict[int, Beat] = {}
        self._at: dict[int, float] = dict.fromkeys(awaited, clock() + allowance)

    def hear(self, beats: Mapping[int, Beat]) -> None:
        """Take note of what ranks say; an old beat is none."""
        known, now = self.beats, self._clock()
        new = {rank: beat for rank, beat in beats.items() if rank not in known or known[rank].count != beat.count}
        # Other threads read both: they are replaced, never changed.
        self.beats, self._at = {**known, **new}, {**self._at, **dict.fromkeys(new, now)}

    def pardon(self, seconds: float) -> None:
        """The observer itself stood still for so long."""
        now = self._clock()
        self._at = {rank: max(at, min(now, at + seconds)) for rank, at in self._at.items()}

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have said nothing for so long."""
        now = self._clock()
        return sorted(rank for rank, at in self._at.items() if now - at > seconds)


def hung_rank(beats: Mapping[int, Beat]) -> int | None:
    """The rank that a job waits for in vain; None as long as any rank gets on or has work of its own to do.

    A rank that waits for others makes no progress either, so none is to blame before all of them are over their
    limits. Then it is the one that is not in a collective; of several, the one that has come least far.
    """
    working = {rank: beat for rank, beat in beats.items() if not beat.finished}
    if not working or not all(beat.over for beat in working.values()):
        return None
    return min(working, key=lambda rank: (working[rank].waiting, working[rank].moves, -working[rank].idle, rank))
