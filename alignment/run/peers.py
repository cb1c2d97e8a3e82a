"""This rank's view of the others: each rank publishes a heartbeat over the process group's store twice a second.

Rank 0 reads the heartbeats of all ranks and the others read that of rank 0, so the traffic grows linearly with the
number of ranks. A rank that fails announces it, and all others exit with its status. If a rank falls silent instead,
its process is looked up if it runs on this machine; of another machine only the time without a heartbeat is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any, NoReturn

from alignment.reporting.status_file import fail_in_place_of
from alignment.run.activity import ACTIVITY
from alignment.run.deadlines import bounded
from alignment.run.ending import Ending, end_with, write
from alignment.run.processes import Process, machine
from alignment.run.requests import REQUESTS
from alignment.run.stop import StopReason

_POLL_S = 0.5  # between two heartbeats
_ASK_S = 3.0  # limit for a call to the store
_LOST_S = 3.0  # for the end of another rank to be noticed after a connection broke
_SILENT_S = 2.0  # without a heartbeat, for a rank to be suspected of it
_DOWN = "the process, its host or its network is down, or it holds Python's interpreter lock (peer_timeout)"
_CAUSES = {
    "stopped": "the process is suspended (peer_timeout)",
    "running": "the process holds Python's interpreter lock (hang_timeout)",
}
_MOST_NAMED = 8
Beat = dict[str, Any]


class Peers(threading.Thread):
    """The other ranks, as one rank sees them; the thread exchanges heartbeats.

    Args:
        store: the store that the ranks share, over a connection that nothing else uses.
        rank, world_size: this rank and the number of ranks.
        by_launcher: whether a launcher serves the store, without which ranks can finish their step; otherwise rank 0
            does, without which the job cannot continue.

    Attributes:
        over: set when this rank no longer exchanges heartbeats, because it has finished or the store is lost.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, by_launcher: bool = False) -> None:
        super().__init__(name="alignment-heartbeat", daemon=True)
        self.rank, self.world_size, self.over = rank, world_size, threading.Event()
        self._store, self._by_launcher = store, by_launcher
        self._place = {"host": socket.gethostname(), "machine": machine(), **Process.of(os.getpid())._asdict()}
        self._beats: dict[int, Beat] = {}  # the newest of the ranks that this one listens to; replaced, never modified
        self._heard: dict[int, float] = {}  # when the newest heartbeats have come
        self._answered = ACTIVITY.now  # when the store has last responded
        self._count = 0
        self._left: Any = None  # "finished", or the ending of a rank that has failed
        self._lost_first = False  # whether the store is lost with rank 0
        self._ends, self._publishing = threading.Lock(), threading.Lock()

    def run(self) -> None:
        """Exchange heartbeats until this rank has finished."""
        while not self.over.is_set():
            with contextlib.suppress(OSError):  # such as too many open files, which may pass
                self._turn()
            self.over.wait(_POLL_S)

    @property
    def progress(self) -> int:
        """A number that changes when any rank makes progress."""
        return ACTIVITY.count + sum(beat["progress"] for beat in self._beats.values())

    @property
    def limit(self) -> float:
        """The longest time without progress that any rank is allowed now, as far as this one knows."""
        own = [] if self._left else [ACTIVITY.limit]
        return max(
            [*own, *(beat["limit"] for beat in self._beats.values() if not beat["left"])], default=ACTIVITY.limit
        )

    @property
    def places(self) -> str:
        """Where the ranks are, as far as this one knows, for messages; the longest without progress is the first."""
        beats = sorted((-beat["idle"], _seen(other, beat)) for other, beat in self._beats.items() if not beat["left"])
        return "; ".join([*(seen for _, seen in beats[:_MOST_NAMED]), self._own_place])

    @property
    def _own_place(self) -> str:
        return f"rank {self.rank} (host {self._place['host']}) in {ACTIVITY.place}"

    def leave(self, failure: Ending | None = None) -> None:
        """Stop, once every rank has finished, or because this one has failed and its program continues.

        After a ``failure``, the others end with it unless they fail as well.
        """
        if failure is not None and failure.lost:
            failure = self._explained(failure)
            write(failure.line)
        # Counted first: a rank that is killed in between is then still missed by the others.
        finished = bounded(lambda: self._store.add("finished", 1), _ASK_S) or 0 if failure is None else 0
        self._left = "finished" if failure is None else asdict(failure)
        bounded(self._publish, _ASK_S)
        if failure is None:
            while finished < self.world_size and not self.over.wait(0.05):
                finished = bounded(lambda: self._store.add("finished", 0), _ASK_S) or 0
        self.over.set()
        self.join(_ASK_S)  # a thread in the store's C++ code would crash the interpreter's exit
        self._let_read()

    def _let_read(self) -> None:
        """If this rank serves the store, which may end with it, wait until the others have read it."""
        if self.rank == 0 and not self._by_launcher:
            time.sleep(2 * _POLL_S)

    def end(self, ending: Ending) -> NoReturn:
        """Announce why the job ends, unless another rank has done so, and exit."""
        if ending.lost:
            ending = self._explained(ending)
        self._ends.acquire()  # never released: one thread ends the process
        first = bounded(lambda: self._store.add("ends", 1), _ASK_S)  # None without a store: then each rank reports
        if first is not None and first > 1:
            self._follow()
        bounded(lambda: self._store.set("end", json.dumps(asdict(ending))), _ASK_S)
        end_with(ending, last=lambda: self._end_others(ending))

    def _explained(self, ending: Ending) -> Ending:
        """After a connection broke, wait for the end of a rank to be noticed; else add which ranks are silent."""
        self.over.wait(_LOST_S)
        silent = [
            _seen(other, beat)
            for other, beat in self._beats.items()
            if not beat["left"] and ACTIVITY.now - self._heard.get(other, ACTIVITY.now) > _SILENT_S
        ]
        return replace(ending, line=f"{ending.line}; silent: {'; '.join(silent)}") if silent else ending

    def _follow(self) -> NoReturn:
        """Exit as another rank has announced, without a message."""
        found = bounded(lambda: Ending(**json.loads(self._store.get("end"))), _ASK_S)
        found = found or Ending("another rank ended the job without reporting a reason")
        end_with(found, speaks=False, last=lambda: self._end_others(found))

    def _end_others(self, ending: Ending) -> None:
        """Kill suspended ranks of this machine, which notice nothing, and record the failure for a lost rank 0."""
        for other, beat in self._beats.items():
            state = self._state_of(beat)
            if state == "stopped":
                os.kill(beat["pid"], signal.SIGKILL)
            lost = state in ("stopped", "gone") or ACTIVITY.now - self._heard[other] > ACTIVITY.limits.peer_timeout
            if other == 0 and (lost or self._lost_first) and ACTIVITY.folder is not None:
                fail_in_place_of(ACTIVITY.folder, beat["host"], beat["pid"], ending.line.removeprefix("error: "))
        self._let_read()

    def check_store(self) -> None:
        """End the job if the store, which blocks the other thread, does not respond; called often."""
        silent = ACTIVITY.now - self._answered
        if silent > ACTIVITY.limits.peer_timeout and not self.over.is_set():
            first = _seen(0, self._beats[0]) if 0 in self._beats else "rank 0"
            what = f"{'the launcher' if self._by_launcher else first} has not responded for {silent:.0f} s: {_DOWN}"
            self.end(Ending(f"error: {self._own_place}: {what}", stacks=True))

    def _turn(self) -> None:
        """Publish a heartbeat, read those of others, and end the job if one of them cannot continue."""
        # Looked up first: whatever a process has published before its end is known when it is judged.
        gone = [other for other, beat in self._beats.items() if self._state_of(beat) == "gone"]
        try:
            if self._store.check(["end"]):
                self._ends.acquire()
                self._follow()
            self._publish()
            self._read()
        except RuntimeError:
            self._lose_store()
            return
        for other, beat in self._beats.items():
            self._judge(other, beat, gone=other in gone)

    def _publish(self) -> None:
        """Write this rank's heartbeat. Rank 0 counts for all ranks, because the others listen to no one else."""
        with self._publishing:  # an older heartbeat must not replace that of leaving
            self._count += 1
            beat = {
                **self._place,
                "count": self._count,
                **{"phase": ACTIVITY.phase, "step": ACTIVITY.step, "idle": ACTIVITY.idle},
                "progress": self.progress if self.rank == 0 else ACTIVITY.count,
                "limit": self.limit if self.rank == 0 else ACTIVITY.limit,
                "asked": int(REQUESTS.reason or 0),
                "detail": REQUESTS.detail or f"received by rank {self.rank}",
                "left": self._left,
            }
            self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _read(self) -> None:
        """Read the heartbeats of the ranks that this one listens to, and stop requests with them."""
        known = self._beats
        others = range(1, self.world_size) if self.rank == 0 else [0]
        come = [other for other in others if other in known or self._store.check([f"beat/{other}"])]
        texts = self._store.multi_get([f"beat/{other}" for other in come]) if come else []
        self._beats = {other: json.loads(text) for other, text in zip(come, texts, strict=True)}
        self._answered = ACTIVITY.now
        for other, beat in self._beats.items():
            if other not in known or known[other]["count"] != beat["count"]:
                self._heard[other] = ACTIVITY.now
            if beat["asked"]:
                REQUESTS.request(StopReason(beat["asked"]), beat["detail"])

    def _state_of(self, beat: Beat) -> str:
        """The state of a rank's process; ``unknown`` on another machine."""
        return Process(beat["pid"], beat["start"]).state if beat["machine"] == self._place["machine"] else "unknown"

    def _judge(self, other: int, beat: Beat, *, gone: bool) -> None:
        """End the job if a rank has ended, or has been silent for too long."""
        silent = ACTIVITY.now - self._heard[other]
        if not gone and silent <= ACTIVITY.limits.peer_timeout:
            return
        if beat["left"]:
            if beat["left"] != "finished":
                self.end(Ending(**beat["left"]))
        elif gone:
            self.end(_killed(other, beat))
        elif (state := self._state_of(beat)) != "running" or silent + beat["idle"] > beat["limit"]:
            line = f"error: {_seen(other, beat)}: no heartbeat for {silent:.0f} s: {_CAUSES.get(state, _DOWN)}"
            self.end(Ending(line, stacks=True))

    def _lose_store(self) -> None:
        """Continue without a launcher that has ended; without rank 0, end."""
        if self.over.is_set() or self._ends.locked():  # it is not needed any more
            return
        first = self._beats.get(0)
        if self._by_launcher:
            REQUESTS.request(StopReason.SIGTERM, "the launcher, which serves the ranks' store, has exited")
        elif first is None:
            self.end(Ending("error: rank 0 was killed or disconnected"))
        elif first["left"] != "finished":
            self._lost_first = True
            self.end(Ending(**first["left"]) if first["left"] else _killed(0, first))
        self.over.set()


def _seen(rank: int, beat: Beat) -> str:
    return f"rank {rank} (host {beat['host']}, process {beat['pid']}) in phase {beat['phase']}, step {beat['step']}"


def _killed(rank: int, beat: Beat) -> Ending:
    return Ending(f"error: {_seen(rank, beat)} was killed or disconnected; the host may have run out of memory")
