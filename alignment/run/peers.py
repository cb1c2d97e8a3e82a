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
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from alignment.reporting.status_file import fail_in_place_of
from alignment.run.activity import ACTIVITY
from alignment.run.deadlines import bounded
from alignment.run.ending import Ending, end_with
from alignment.run.processes import Process, machine
from alignment.run.requests import REQUESTS, StopRequests
from alignment.run.stop import StopReason

_POLL_S = 0.5  # between two heartbeats
_GAP_S = 3.0  # a longer one means that this process was suspended
_ASK_S = 3.0  # limit for a call to the store
_LOST_S = 3.0  # for the end of another rank to be noticed after a connection broke
_DOWN = "the process, its host or its network is down, or it holds Python's interpreter lock (peer_timeout)"
_CAUSES = {
    "stopped": "the process is suspended (peer_timeout)",
    "running": "the process holds Python's interpreter lock (hang_timeout)",
}
_MOST_NAMED = 8
Beat = dict[str, Any]


class Peers:
    """The other ranks, as one rank sees them.

    Args:
        store: the store that the ranks share, over a connection that nothing else uses.
        rank, world_size: this rank and the number of ranks.
        first_s: how long the first heartbeat of a rank may take, in addition to peer_timeout.
        lost_launcher: called with the reason when the store is lost, if a launcher serves it: ranks can finish their
            step without it. None if rank 0 serves it, without which the job cannot continue.
        requests, clock: stop requests of this process, and a clock in seconds.

    Attributes:
        beats: the newest heartbeats of the ranks that this one listens to; replaced and never modified.
        alone: the store is lost, and this rank continues without the others' heartbeats.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        first_s: float,
        lost_launcher: Callable[[str], None] | None = None,
        requests: StopRequests = REQUESTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world_size, self.alone = rank, world_size, False
        self._store, self._clock, self._requests, self._lost_launcher = store, clock, requests, lost_launcher
        self._serves = rank == 0 and lost_launcher is None
        self._host, self._machine, self._process = socket.gethostname(), machine(), Process.of(os.getpid())
        self.beats: dict[int, Beat] = {}
        self._heard = dict.fromkeys(range(1, world_size) if rank == 0 else [0], clock() + first_s)
        self._answered = self._turned = clock()  # when the store has last responded, and the last turn
        self._count, self._final = 0, Beat()
        self._ends, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="alignment-heartbeat", daemon=True)

    def begin(self) -> None:
        """Publish the first heartbeat, by which others know the process, and start the thread that exchanges them."""
        with contextlib.suppress(OSError, RuntimeError):  # the thread tries again
            self._publish()
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            with contextlib.suppress(OSError):  # such as too many open files, which may pass
                self._turn()

    @property
    def progress(self) -> int:
        """A number that changes when any rank makes progress."""
        return ACTIVITY.count + sum(beat["progress"] for beat in self.beats.values())

    @property
    def limit(self) -> float:
        """The longest time without progress that any rank is allowed now, as far as this one knows."""
        own = [] if self._final else [ACTIVITY.limit]
        return max([*own, *(beat["limit"] for beat in self.beats.values() if not beat["left"])], default=float("inf"))

    @property
    def places(self) -> str:
        """Where the ranks are, as far as this one knows, for messages; the longest without progress is the first."""
        beats = sorted((-beat["idle"], other, beat) for other, beat in self.beats.items() if not beat["left"])
        others = [f"rank {other} (host {beat['host']}) in {_place(beat)}" for _, other, beat in beats[:_MOST_NAMED]]
        return "; ".join([*others, f"rank {self.rank} (host {self._host}) in {ACTIVITY.place}"])

    # The end of this rank --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every rank has finished, and stop."""
        bounded(lambda: self._publish(left="finished"), _ASK_S)
        finished = bounded(lambda: self._store.add("finished", 1), _ASK_S) or 0
        while finished < self.world_size and not self.alone:
            time.sleep(0.05)
            finished = bounded(lambda: self._store.add("finished", 0), _ASK_S) or 0
        self._stop()

    def fail(self, ending: Ending, *, lost: bool) -> None:
        """Stop because this rank has failed, while its program continues. The others end unless they fail as well.

        Args:
            ending: why this rank has failed.
            lost: whether a connection to another rank broke; if that rank has ended, this process ends here.
        """
        self._over.wait(_LOST_S if lost else 0.0)
        bounded(lambda: self._publish(left=asdict(ending)), _ASK_S)
        self._stop()

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(_ASK_S)  # a thread in the store's C++ code would crash the interpreter's exit
        if self._serves:
            time.sleep(_POLL_S)  # the store may end with this process, and the others have to read it

    def end(self, ending: Ending, *, trace: str = "", lost: bool = False) -> NoReturn:
        """Announce why the job ends, unless another rank has done so, and exit.

        Args:
            ending: why the job ends.
            trace: traceback that precedes the line.
            lost: whether a connection to another rank broke: the end of that rank may be noticed first.
        """
        if lost and not self.alone:
            time.sleep(_LOST_S)
        self._ends.acquire()  # never released: one thread ends the process
        first = None if self.alone else bounded(lambda: self._store.add("ends", 1), _ASK_S)
        if first is not None and first > 1:
            self._follow()
        if first is not None:
            bounded(lambda: self._store.set("end", json.dumps(asdict(ending))), _ASK_S)
        end_with(ending, trace=trace, last=lambda: self._end_others(ending))

    def _follow(self) -> NoReturn:
        """Exit as another rank has announced, without a message."""
        found = bounded(lambda: Ending(**json.loads(self._store.get("end"))), _ASK_S)
        found = found or Ending("another rank ended the job without reporting a reason")
        end_with(found, speaks=False, last=lambda: self._end_others(found))

    def _end_others(self, ending: Ending) -> None:
        """Kill suspended ranks of this machine, which notice nothing, and record the failure for a lost rank 0."""
        for other, beat in self.beats.items():
            state = self._state_of(beat)
            if state == "stopped":
                os.kill(beat["pid"], signal.SIGKILL)
            lost = state in ("stopped", "gone") or self._clock() - self._heard[other] > ACTIVITY.limits.silence
            if other == 0 and lost and ACTIVITY.folder is not None:
                fail_in_place_of(ACTIVITY.folder, beat["host"], beat["pid"], ending.line.removeprefix("error: "))
        gone = sum(self._state_of(beat) == "gone" for beat in self.beats.values())
        if self._serves and gone < self.world_size - 1:
            time.sleep(2 * _POLL_S)  # as above

    # The end of others -----------------------------------------------------------------------------------------------

    def tick(self, suspended: float) -> None:
        """End the job if the store, which blocks the other thread, does not respond; called often.

        Args:
            suspended: seconds for which this process was suspended just now.
        """
        self._answered = min(self._clock(), self._answered + suspended)
        silence, first = ACTIVITY.limits.silence, self.beats.get(0)
        if self.alone or self._over.is_set() or self._clock() - self._answered <= silence:
            return
        what = "the launcher" if self._lost_launcher is not None else "rank 0"
        seen = f" (host {first['host']}, last seen in {_place(first)})" if first is not None else ""
        who = f"rank {self.rank} (host {self._host}) in {ACTIVITY.place}"
        line = f"error: {who}: {what}, which coordinates the ranks, has not responded for {silence:g} s{seen}: {_DOWN}"
        self.end(Ending(line, stacks=True))

    def _turn(self) -> None:
        """Publish a heartbeat, read those of others, and end the job if one of them cannot continue."""
        # Looked up first: whatever a process has published before its end is known when it is judged.
        gone = [other for other, beat in self.beats.items() if self._state_of(beat) == "gone"]
        try:
            if self._store.check(["end"]):
                self._ends.acquire()
                self._follow()
            self._publish()
            self._read()
        except RuntimeError:
            self._lose_store()
            return
        for other, heard in self._heard.items():
            self._judge(other, self.beats.get(other), self._clock() - heard, gone=other in gone)

    def _publish(self, **final: Any) -> None:
        """Write this rank's heartbeat; ``final`` are values of this one and of all further ones."""
        self._final |= final
        self._count += 1
        beat = {
            "count": self._count,
            **{"host": self._host, "machine": self._machine, **self._process._asdict()},
            **{"phase": ACTIVITY.phase, "step": ACTIVITY.step, "idle": ACTIVITY.idle},
            # Those of rank 0 are of all ranks: the others listen to no one else.
            "progress": self.progress if self.rank == 0 else ACTIVITY.count,
            "limit": self.limit if self.rank == 0 else ACTIVITY.limit,
            "asked": int(self._requests.reason or 0),
            "detail": self._requests.detail or f"received by rank {self.rank}",
            "left": None,  # "finished", or the ending of a rank that has failed
            **self._final,
        }
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _read(self) -> None:
        """Read the heartbeats of the ranks that this one listens to, and stop requests with them."""
        known = self.beats
        come = [other for other in self._heard if other in known or self._store.check([f"beat/{other}"])]
        texts = self._store.multi_get([f"beat/{other}" for other in come]) if come else []
        beats = {other: json.loads(text) for other, text in zip(come, texts, strict=True)}
        now = self._clock()
        gap = now - self._turned if now - self._turned > _GAP_S else 0.0  # not the fault of the others
        new = [other for other in beats if other not in known or known[other]["count"] != beats[other]["count"]]
        self._heard = {other: max(at, min(now, at + gap)) for other, at in self._heard.items()}
        self._heard |= dict.fromkeys(new, now)
        self.beats, self._answered, self._turned = beats, now, now
        for beat in beats.values():
            if beat["asked"]:
                self._requests.request(StopReason(beat["asked"]), beat["detail"])

    def _state_of(self, beat: Beat) -> str:
        """The state of a rank's process; ``unknown`` on another machine."""
        return Process(beat["pid"], beat["start"]).state if beat["machine"] == self._machine else "unknown"

    def _judge(self, other: int, beat: Beat | None, silent: float, *, gone: bool) -> None:
        """End the job if a rank has ended, or has been silent for too long."""
        silence = ACTIVITY.limits.silence
        if beat is None and silent > silence:
            line = f"error: rank {other} has sent no heartbeat since the ranks joined: {_DOWN}"
            self.end(Ending(line, stacks=True))
        if beat is None or beat["left"] == "finished" or not (gone or silent > silence):
            return
        if beat["left"]:
            self.end(Ending(**beat["left"]))
        if gone:
            self.end(Ending(_killed(other, beat)))
        state = self._state_of(beat)
        if state == "running" and silent + beat["idle"] <= beat["limit"]:
            return
        who, cause = f"rank {other} (host {beat['host']})", _CAUSES.get(state, _DOWN)
        shown = max(silence, silent if state == "running" else 0.0)
        line = f"error: {who} has sent no heartbeat for {shown:.3g} s, last seen in {_place(beat)}: {cause}"
        self.end(Ending(line, stacks=True))

    def _lose_store(self) -> None:
        """Continue without a launcher that has ended; without rank 0, end."""
        if self._over.is_set() or self._ends.locked():  # it is not needed any more
            return
        self.alone, first = True, self.beats.get(0)
        if self._lost_launcher is not None:
            self._over.set()
            self._lost_launcher("the launcher, which coordinates the ranks, has exited")
        elif first is None or not first["left"]:
            self.end(Ending("error: rank 0 was killed or disconnected" if first is None else _killed(0, first)))


def _place(beat: Beat) -> str:
    return f"phase {beat['phase']}, step {beat['step']}"


def _killed(rank: int, beat: Beat) -> str:
    who = f"rank {rank} (host {beat['host']}, process {beat['pid']})"
    return f"error: {who} was killed or disconnected in {_place(beat)}; the host may have run out of memory"
