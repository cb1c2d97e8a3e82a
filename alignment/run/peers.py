"""This rank's view of the others: which are alive, have failed or have finished.

Ranks exchange heartbeats over the process group's store twice a second. The rank that finds that the job cannot
continue claims the right to report it. The others fall silent, let it write its line, and exit with its status.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from alignment.reporting.status_file import fail_in_place_of
from alignment.run.activity import ACTIVITY
from alignment.run.beats import Heard, Pulse, hung_rank
from alignment.run.deadlines import bounded
from alignment.run.ending import write_beside_bars
from alignment.run.exchange import Exchange
from alignment.run.last_word import ASK_S, LastWord, Verdict
from alignment.run.lines import hung_line, killed_line, lost_line, silent_line, silent_store_line
from alignment.run.neighbors import Neighbors

_POLL_S = 0.5  # between two heartbeats
_START_S = 30.0  # grace period for the first heartbeat, in addition to peer_timeout
_DEAD_S = 5.0  # of silence: when the job ends anyway, such a rank is taken for dead
_LEAVE_S = 10.0  # how long rank 0 keeps the store for other finished ranks
_LOST_S = 1.2  # to find the rank whose connection broke; more than two heartbeats
_GRACE_S = 0.7  # after the end of a peer's process, for its last message


class Peers:
    """The other ranks, as one rank sees them.

    Args:
        store: the store that the ranks share, over a connection that nothing else uses.
        rank, world_size: this rank and the number of ranks.
        server: the store of the process group, which this object keeps alive: on rank 0 it may be the one that serves
            the others.
        lost_store: called when the store is lost, if a launcher serves it: ranks can finish their last step without
            it. None if rank 0 serves it, without which the job cannot continue.
        launcher_stopped: returns whether a launcher of this process is suspended.
        clock: clock in seconds.

    Attributes:
        alone: the store is lost, and this rank continues without the others' heartbeats.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        server: Any = None,
        lost_store: Callable[[str], None] | None = None,
        launcher_stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._server, self._lost_store, self._clock = store, server, lost_store, clock
        self._launcher_stopped = launcher_stopped
        self._others = [other for other in range(world_size) if other != rank]
        self._pulse, self._neighbors = Pulse(rank), Neighbors()
        self._heard = Heard(clock, self._others if rank == 0 else [0], _START_S)
        self._exchange = Exchange(self._call, rank, world_size, self._pulse, self._heard, self._neighbors)
        self._last_word = LastWord(store, rank, self._bury)
        self._own_end = self.alone = False
        self._answered = clock()
        self._fallen: dict[int, float] = {}
        self._absent: set[int] = set()
        self._told: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="alignment-guard", daemon=True)
        self._thread.start()

    # The end of this rank --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every rank has finished. Rank 0, which may serve the store, leaves last."""
        self._pulse.finished = True
        count = self._count("finished", 1)
        while count < self.world_size and not self.alone:
            time.sleep(0.1)
            count = self._count("finished", 0)
        self._own_end = True
        # A thread that is in the store's C++ code when the interpreter exits would crash the process.
        self._over.set()
        self._thread.join(ASK_S)
        if self.rank != 0 and not self.alone:
            bounded(lambda: self._store.set(f"left/{self.rank}", "1"), ASK_S)
        elif not self.alone:
            self._wait(self._all_left, _LEAVE_S)
        self._neighbors.close()

    def _all_left(self) -> bool:
        """Whether the store is no longer needed: every other rank has left or its process has ended."""
        awaited = [f"left/{other}" for other in self._others if other not in self._neighbors.gone]
        return not awaited or bool(bounded(lambda: self._store.check(awaited), ASK_S))

    def fail(
        self, line: str, verdict: Verdict, *, trace: str = "", lost: bool = False, at_once: bool = False
    ) -> NoReturn:
        """Report why the job ends if no other rank does, and exit.

        Args:
            line: message for the user.
            verdict: verdict for the other ranks.
            trace: traceback that precedes the line.
            lost: whether a connection to another rank broke. Other ranks may know better which one it was, and why.
            at_once: do not wait for the others to fall silent.
        """
        if lost:
            line, verdict = self._lost_peer(line, verdict)
        verdict = replace(verdict, dead=tuple(sorted({*verdict.dead, *self._dead()} - {self.rank})))
        self._own_end = True  # before the claim: the other thread must not mistake it for another rank's
        self._last_word.speak(line, verdict, lambda: self._living(verdict.dead), trace=trace, at_once=at_once)

    # The end of others -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Send and read heartbeats, in a thread that the store may block for any length of time."""
        while not self.alone and not self._own_end:
            try:
                self._turn()
            except Exception as error:  # such as too many open files, which may pass
                self._tell_once(error)
            self._over.wait(_POLL_S)

    def _turn(self) -> None:
        self._pardon(ACTIVITY.tick())
        if self._call("check", ["claim"]) and not self._own_end:
            self._last_word.follow()
        self._exchange.turn()
        self._answered = self._clock()
        if not self._own_end:
            self._judge()

    def _pardon(self, seconds: float) -> None:
        """Extend all deadlines by the time that this process was suspended."""
        if seconds:
            self._answered = min(self._clock(), self._answered + seconds)
            self._heard.pardon(seconds)

    def _tell_once(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        if what not in self._told:
            self._told.add(what)
            write_beside_bars(f"rank {self.rank}: monitoring the other ranks raised {what}; monitoring continues")

    def _judge(self) -> None:
        """End the job if a rank that this one listens to is silent, or if one rank blocks all others."""
        silence = ACTIVITY.limits.silence
        silent = self._silent(silence)
        if silent:
            beat = self._heard.beats.get(silent[0])
            self.fail(silent_line(silent[0], beat, silence), Verdict(dead=tuple(silent)))
        if self.rank == 0 and len(self._heard.beats) == self.world_size:
            hung = hung_rank(self._heard.beats)
            if hung is not None:
                self.fail(hung_line(hung, self._heard.beats[hung], self.world_size), Verdict(hung=True))

    def _silent(self, seconds: float) -> list[int]:
        return [other for other in self._heard.silent(seconds) if other != self.rank]

    def _dead(self) -> list[int]:
        """Silent ranks, as far as this one can tell: it must itself have been in contact with the store just now."""
        in_touch = self._clock() - self._answered < 4 * _POLL_S
        return self._silent(_DEAD_S) if in_touch else []

    def tick(self) -> None:
        """Detect what the other thread cannot while the store blocks it; called often by a thread that never blocks.

        This covers the silence of the store itself and the end of processes on this machine.
        """
        self._pardon(ACTIVITY.tick())
        now = self._clock()
        if self._own_end or self.alone:
            return
        silence = ACTIVITY.limits.silence
        if now - self._answered > silence:
            self._store_is_silent(silence)
        self._notice_ends(now)

    def _notice_ends(self, now: float) -> None:
        for other in self._neighbors.gone:
            self._fallen.setdefault(other, now)
        fallen = next((other for other, at in self._fallen.items() if now - at >= _GRACE_S), None)
        if fallen is None or bounded(lambda: self._store.add("finished", 0), ASK_S) == self.world_size:
            return
        beats = bounded(lambda: self._exchange.read([fallen]), ASK_S)
        if beats:  # otherwise the store is lost as well, which the other thread reports
            self.fail(killed_line(fallen, beats[fallen]), Verdict(dead=(fallen,)))

    def _store_is_silent(self, silence: float) -> None:
        if self._lost_store is not None and self._launcher_stopped():
            self._go_on_alone("the launcher, which coordinates the ranks, was suspended (SIGSTOP, Ctrl-Z)")
            return
        by_launcher = self._lost_store is not None
        first, host = self._heard.beats.get(0), self._pulse.host
        line = silent_store_line(self.rank, host, first, silence, by_launcher=by_launcher)
        self._speak_for_machine(line, Verdict(dead=() if by_launcher else (0,)))

    def _go_on_alone(self, why: str) -> None:
        if not self.alone and self._lost_store is not None:
            self.alone = True
            self._lost_store(why)

    def _lost_peer(self, line: str, verdict: Verdict) -> tuple[str, Verdict]:
        """Find the missing rank after a connection broke; a rank that fails gets time to report it.

        A process of this machine that has ended is the missing one; one that is alive is not. Among the ranks of other
        machines, it is one that no longer sends heartbeats; it may just be slow and is not killed for that.
        """
        before = bounded(lambda: self._exchange.read(self._others), _LOST_S) if self._exchange.met else None
        end = self._clock() + _LOST_S
        while self._clock() < end:
            if bounded(lambda: self._store.check(["claim"]), ASK_S):
                self._last_word.follow()
            time.sleep(0.1)
        after = bounded(lambda: self._exchange.read(self._others), _LOST_S)
        gone = self._neighbors.gone
        if gone:
            return killed_line(gone[0], (after or self._heard.beats).get(gone[0])), Verdict(dead=tuple(gone))
        if not before or not after:
            return line, verdict
        still = [other for other in self._others if after[other].count == before[other].count]
        missing = [other for other in still if other not in self._neighbors]
        if not missing:
            return line, verdict
        self._absent = set(missing)
        return lost_line(missing[0], after[missing[0]]), verdict

    def _living(self, dead: Sequence[int]) -> list[int]:
        silent = self._heard.silent(6 * _POLL_S)
        gone = {*dead, *self._absent, *self._neighbors.gone, *silent, self.rank}
        return [other for other in range(self.world_size) if other not in gone]

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = self._clock() + seconds
        while not reached() and self._clock() < end:
            time.sleep(0.1)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the store; if the store is lost, the job cannot continue and this process exits.

        Exceptions: a store of a launcher, without which ranks can finish their last step, and a rank that is exiting.
        """
        try:
            # For each call to a lost store, torch would write pages of C++ frames.
            return _NOTHING[method] if self._own_end else getattr(self._store, method)(*arguments)
        except RuntimeError:
            if self._own_end:
                return _NOTHING[method]
            if self._lost_store is None:
                self._speak_for_machine(killed_line(0, self._heard.beats.get(0)), Verdict(dead=(0,)))
            self._go_on_alone("the launcher, which coordinates the ranks, has exited")
            return _NOTHING[method]

    def _count(self, name: str, more: int) -> int:
        """Increase a counter of the store and return it; 0 once this rank is alone: a suspended store is mute."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(self._call("add", name, more)), daemon=True)
        thread.start()
        while thread.is_alive() and not self.alone:
            thread.join(0.1)
        return found[0] if found else 0

    def _speak_for_machine(self, line: str, verdict: Verdict) -> NoReturn:
        """Report without a store: the lowest living rank of each machine does, as the ranks can no longer agree."""
        dead = {*verdict.dead, *self._neighbors.gone}
        speaks = not any(other < self.rank and other not in dead for other in self._neighbors)
        self._own_end = True
        self._last_word.speak(line, verdict, at_once=True, speaks=speaks)

    def _bury(self, verdict: Verdict, line: str, speaks: bool) -> None:
        """Kill dead ranks of this machine: a suspended process does not receive anything else.

        If the rank that writes ``status.json`` is one of them, the reporting rank records the failure there.
        """
        for other in verdict.dead:
            self._neighbors.kill(other)
        first = self._heard.beats.get(0)
        if speaks and 0 in verdict.dead and first is not None and ACTIVITY.folder is not None:
            fail_in_place_of(ACTIVITY.folder, first.host, first.pid, line.removeprefix("error: "))


# Results of calls to a store that is no longer needed.
_NOTHING: dict[str, Any] = {"add": 0, "check": False, "set": None, "multi_get": [], "get": None}
