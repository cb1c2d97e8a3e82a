"""Signs of life: what each rank says of itself twice a second, and what an observer makes of it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from alignment.engines.checkpoints.owner import Owner
from alignment.reporting.activity import ACTIVITY

_COLLECTIVES = ("torch/distributed/", "deepspeed/comm/")
_GAP_S = 3.0
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
    """Makes the beats of this process."""

    def __init__(self) -> None:
        own = Owner.this_process()
        self.host, self.machine = socket.gethostname(), f"{own.boot}/{own.space}"
        self.count, self.finished = 0, False

    def beat(self) -> Beat:
        """The next one."""
        self.count += 1
        idle, limit = ACTIVITY.idle, ACTIVITY.limit
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
        )


class Gap:
    """Notices that this process stood still: a suspended job, a sleeping machine.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock, self._last = clock, threading.Lock(), clock()

    def seconds(self) -> float:
        """Since the last call, if that is longer than any thread lets pass between two calls; else 0."""
        with self._lock:
            now = self._clock()
            gap, self._last = now - self._last, now
        return gap if gap > _GAP_S else 0.0


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
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.beats: dict[int, Beat] = {}
        self._at: dict[int, float] = {}

    def hear(self, rank: int, beat: Beat) -> None:
        """Take note of what a rank says; an old beat is none."""
        known = self.beats.get(rank)
        if known is None or known.count != beat.count:
            self.beats[rank], self._at[rank] = beat, self._clock()

    def pardon(self, seconds: float) -> None:
        """The observer itself stood still for so long."""
        self._at = {rank: at + seconds for rank, at in self._at.items()}

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
