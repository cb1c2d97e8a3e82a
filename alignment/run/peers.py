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
from pathlib import Path
from typing import Any, NoReturn

import psutil

from alignment.run.activity import ACTIVITY
from alignment.run.ending import Ending, bounded, end_with
from alignment.run.status_file import fail_in_place_of
from alignment.run.stop import REQUESTS, StopReason

_POLL_S, _LEAVING_S = 0.5, 0.05  # between two heartbeats; while this rank waits for the others to finish
_ASK_S, _FOLLOW_S = 3.0, 5.0  # limits for a call to the store, and for other ranks to fail or stop like this one
_LOST_S = 5.0  # for the end of another rank to be noticed after a connection broke
_SILENT_S = 2.0  # without a heartbeat, for a rank to be suspected of it
_RANK = "rank {rank} (host {host}, process {pid}) in phase {phase}, step {step}"
_KILLED = "was killed or disconnected; the host may have run out of memory"
_DOWN = "the process, its host or its network is down, or it holds Python's interpreter lock (peer_timeout)"
_CAUSES = {
    "stopped": "the process is suspended (peer_timeout)",
    "running": "the process holds Python's interpreter lock (hang_timeout)",
}


def state_of(pid: int) -> str:
    """The state of a process of this machine: ``running``, ``stopped`` (as after SIGSTOP or Ctrl-Z) or ``gone``."""
    try:
        return {"stopped": "stopped", "zombie": "gone"}.get(psutil.Process(pid).status(), "running")
    except (psutil.Error, OSError) as error:  # such as too many open files, which may pass
        return "gone" if isinstance(error, psutil.NoSuchProcess) else "running"


class Peers(threading.Thread):
    """The other ranks, as one rank sees them. The thread only exchanges heartbeats, since the store may block it."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(name="alignment-heartbeat", daemon=True)
        self._store, self._rank, self._size = store, rank, world_size
        host, boot, space = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
        # Equal for processes that see each other: boot of the kernel, and PID namespace.
        machine = bounded(lambda: boot.read_text("utf-8") + os.readlink(space), _ASK_S) or f"{host}/{os.getpid()}"
        self._own = {"rank": rank, "host": host, "machine": machine, "pid": os.getpid()}
        self._here = f"rank {rank} on host {host}"
        self._beats: dict[int, dict[str, Any]] = {}  # the newest of the ranks that this one listens to
        self._gone: set[int] = set()  # ranks that have ended without an announcement
        self._announced: tuple[Ending, float] | None = None  # why a rank has failed, and when this one learned of it
        self._answered = ACTIVITY.now  # when the store has last responded
        self._finished, self._over, self._ends = False, threading.Event(), threading.Lock()

    def run(self) -> None:
        """Exchange heartbeats until this rank leaves, or the store is lost."""
        try:
            while not self._over.wait(_LEAVING_S if self._finished else _POLL_S):
                with contextlib.suppress(OSError):  # it may pass
                    self._turn()
        except RuntimeError:  # the process that serves the store has ended
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if by_agent and not self._over.is_set():  # the ranks can finish their step
                REQUESTS.request(StopReason.SIGTERM, "torchrun, which serves the ranks' store, has exited")
            if by_agent or (0 in self._beats and not self._beats[0]["limit"]):  # rank 0 has finished
                self._over.set()
            self._gone = {0}

    def leave(self, failure: Ending | None = None) -> None:
        """Stop, once every rank has finished, or because this one has failed and its program continues.

        After a ``failure``, the others end with it unless they fail by themselves within ``peer_timeout``.
        """
        try:
            if failure is None:
                ACTIVITY.progress()
                self._finished = True
                bounded(lambda: self._store.add("finished", 1), _ASK_S)
                self._over.wait()
            else:
                self._announce(replace(failure, grace=ACTIVITY.limits.peer_timeout))
                bounded(lambda: self._store.add("left", 1), _ASK_S)
        finally:  # also after Ctrl-C
            self._over.set()
            self.join(_ASK_S)  # a thread in the store's C++ code would crash the interpreter's exit
        if failure or self._rank == 0:
            seconds = _FOLLOW_S if failure else ACTIVITY.limits.peer_timeout
            bounded(lambda: self._wait_for_all(seconds), seconds + _ASK_S)

    def _wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks have left: they would be ended with this process, or with the store of rank 0."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._store.add("left", 0) < self._size:
            time.sleep(_LEAVING_S)

    def end(self, ending: Ending) -> NoReturn:
        """Announce why the job ends, and exit; if another rank has announced a reason before, with that one."""
        announced = self._announce(ending)
        self._ends.acquire()  # never released: one thread ends the process
        speaks = bounded(lambda: self._store.add("reports", 1), _ASK_S) in (1, None)  # without a store, each rank does
        end_with(announced, speaks=speaks, last=lambda: self._end_others(announced))

    def _announce(self, ending: Ending) -> Ending:
        """Announce an ending; return the first one of all ranks, which counts."""
        if ending.lost:  # the end of another rank, which is the cause, may be noticed
            self._over.wait(_LOST_S)
            beats = [beat for beat in self._beats.values() if beat["limit"]]
            silent = [_RANK.format(**beat) for beat in beats if ACTIVITY.now - beat["heard"] > _SILENT_S]
            ending = replace(ending, lost=False, line="; silent: ".join([ending.line, *silent]))
        text = json.dumps(asdict(ending))
        return Ending(**json.loads(bounded(lambda: self._store.compare_set("end", "", text), _ASK_S) or text))

    def _end_others(self, ending: Ending) -> None:
        """Kill suspended ranks of this machine, which notice nothing, and record the failure for a lost rank 0."""
        for other, beat in self._beats.items():
            if self._state(other) == "stopped":
                os.kill(beat["pid"], signal.SIGKILL)
            lost = other in self._gone or ACTIVITY.now - beat["heard"] > ACTIVITY.limits.peer_timeout
            if other == 0 and lost and ACTIVITY.folder is not None:
                fail_in_place_of(ACTIVITY.folder, beat["host"], beat["pid"], ending.line.removeprefix("error: "))
        self._wait_for_all(0.0 if self._rank else 2 * _POLL_S)

    def progress(self) -> tuple[float, float, str]:
        """The time without progress of any rank, its limit, and where the ranks are that have not finished."""
        late = [beat for beat in (self._beat(), *self._beats.values()) if beat["limit"]]
        late.sort(key=lambda beat: -float(beat["idle"]))
        where = "; ".join(_RANK.format(**beat) for beat in late[:8])
        return late[-1]["idle"] if late else 0.0, max([0.0, *(beat["limit"] for beat in late)]), where

    def verdict(self) -> Ending | None:
        """Why the job cannot continue, if so; never waits for the store."""
        if self._over.is_set():
            return None
        if self._announced and (0 in self._gone or ACTIVITY.now - self._announced[1] >= self._announced[0].grace):
            return self._announced[0]
        for other in self._gone:
            who = _RANK.format(**self._beats[other]) if other in self._beats else f"rank {other}"
            return Ending(f"error: {who} {_KILLED}")
        for other, beat in self._beats.items():
            if beat["limit"] and (silent := ACTIVITY.now - beat["heard"]) > ACTIVITY.limits.peer_timeout:
                if (state := self._state(other)) != "running" or silent + beat["idle"] > beat["limit"]:
                    why = f"no heartbeat for {silent:.0f} s at {self._here}: {_CAUSES.get(state, _DOWN)}"
                    return Ending(f"error: {_RANK.format(**beat)}: {why}", stacks=True)
        if (silent := ACTIVITY.now - self._answered) > ACTIVITY.limits.peer_timeout:
            what = f"no response of the store of rank 0 or torchrun for {silent:.0f} s at {self._here}"
            return Ending(f"error: {what}: {_DOWN}", stacks=True)
        return None

    def _state(self, other: int) -> str:
        beat = self._beats[other]
        return state_of(beat["pid"]) if beat["machine"] == self._own["machine"] else "unknown"

    def _turn(self) -> None:
        """Publish a heartbeat, and read those of other ranks."""
        # Looked up first: whatever a process has published before its end is then known when it is judged.
        gone = {other for other in self._beats if self._state(other) == "gone"}
        if self._announced is None and self._store.check(["end"]):
            self._announced = Ending(**json.loads(self._store.get("end"))), ACTIVITY.now
        if self._finished and self._store.add("finished", 0) >= self._size:
            self._store.add("left", 1)
            self._over.set()
            return
        self._store.set(f"beat/{self._rank}", json.dumps(self._beat()))
        others = range(1, self._size) if self._rank == 0 else [0]
        come = [other for other in others if other in self._beats or self._store.check([f"beat/{other}"])]
        beats = {other: json.loads(self._store.get(f"beat/{other}")) for other in come}
        self._answered = ACTIVITY.now
        for other, beat in beats.items():
            before = self._beats.get(other, {})
            beat["heard"] = before["heard"] if before.get("now") == beat["now"] else ACTIVITY.now
            if beat["asked"]:
                REQUESTS.request(StopReason(beat["asked"]), beat["detail"])
        # Replaced, since the other threads iterate over them. A rank that has finished may end.
        self._beats, self._gone = beats, {other for other in gone if beats[other]["limit"]}

    def _beat(self) -> dict[str, Any]:
        return {
            **{**self._own, "phase": ACTIVITY.phase, "step": ACTIVITY.step, "idle": ACTIVITY.idle},
            **{"now": ACTIVITY.now, "limit": 0 if self._finished else ACTIVITY.limit},
            **{"asked": int(REQUESTS.reason or 0), "detail": REQUESTS.detail or f"received by rank {self._rank}"},
        }
