"""This rank's line to the others: who lives, who has failed, who has finished.

Ranks talk over the process group's store, and hear of each other twice a second. Whoever finds that the job cannot go
on claims the right to say so. The others fall silent, let it write its line, and end with its exit status.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from alignment.engines.deadlines import bounded
from alignment.engines.watch.beats import Heard, Pulse, hung_rank
from alignment.engines.watch.ending import write_beside_bars
from alignment.engines.watch.exchange import Exchange
from alignment.engines.watch.last_word import ASK_S, LastWord, Verdict
from alignment.engines.watch.lines import hung_line, killed_line, lost_line, silent_line, silent_store_line
from alignment.engines.watch.neighbours import Neighbours
from alignment.reporting.activity import ACTIVITY
from alignment.reporting.status_file import fail_in_place_of

_POLL_S = 0.5  # between two beats
_START_S = 30.0  # that a rank has for its first beat, beyond what it may be silent later on
_DEAD_S = 5.0  # of silence: where the job ends anyway, such a rank cannot end by itself
_LEAVE_S = 10.0  # how long rank 0 keeps the store for ranks that have finished too
_LOST_S = 1.2  # in which a rank whose connection has broken is found among the others; more than two beats
_GRACE_S = 0.7  # after the end of a peer's process, for what it may have said before


class Peers:
    """The other ranks, as one rank sees them.

    Args:
        store: over which ranks talk; this connection is used for nothing else.
        rank, world_size: this rank, and how many there are.
        server: the store of the process group, kept as long as this object: on rank 0 it may be the one that serves
            the others.
        lost_store: called when the store has gone, where a launcher serves it: ranks can do their last step without.
            None: rank 0 serves it, so that nothing goes on without.
        launcher_stopped: whether a launcher of this process stands still.
        clock: in seconds.

    Attributes:
        alone: the store has gone, and this rank goes on without the others' signs of life.
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
        self._pulse, self._neighbours = Pulse(rank), Neighbours()
        self._heard = Heard(clock, self._others if rank == 0 else [0], _START_S)
        self._exchange = Exchange(self._call, rank, world_size, self._pulse, self._heard, self._neighbours)
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
        """Wait until every rank has finished. Rank 0, which may hold the store, goes last."""
        self._pulse.finished = True
        count = self._count("finished", 1)
        while count < self.world_size and not self.alone:
            time.sleep(0.1)
            count = self._count("finished", 0)
        self._own_end = True
        # A thread that is in the store's C++ when the interpreter ends takes the process down with it.
        self._over.set()
        self._thread.join(ASK_S)
        if self.rank != 0 and not self.alone:
            bounded(lambda: self._store.set(f"left/{self.rank}", "1"), ASK_S)
        elif not self.alone:
            self._wait(self._all_left, _LEAVE_S)
        self._neighbours.close()

    def _all_left(self) -> bool:
        """Whether the store is needed no more: every other rank has said so, or its process has ended."""
        awaited = [f"left/{other}" for other in self._others if other not in self._neighbours.gone]
        return not awaited or bool(bounded(lambda: self._store.check(awaited), ASK_S))

    def fail(
        self, line: str, verdict: Verdict, *, trace: str = "", lost: bool = False, at_once: bool = False
    ) -> NoReturn:
        """Say why the job ends if no other rank does, and end this process.

        Args:
            line: for the user.
            verdict: for the other ranks.
            trace: before the line.
            lost: a connection to another rank broke. Which one it was, and why, others may know better.
            at_once: do not wait for the others to fall silent.
        """
        if lost:
            line, verdict = self._lost_peer(line, verdict)
        verdict = replace(verdict, dead=tuple(sorted({*verdict.dead, *self._dead()} - {self.rank})))
        self._own_end = True  # before the claim: the other thread must not take it for another rank's
        self._last_word.speak(line, verdict, lambda: self._living(verdict.dead), trace=trace, at_once=at_once)

    # The end of others -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The thread that beats and listens; it may wait for the store as long as the store likes."""
        while not self.alone and not self._own_end:
            try:
                self._turn()
            except Exception as error:  # such as too many open files: they may be closed again
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
        """Where this process stood still, nobody else has been silent either."""
        if seconds:
            self._answered = min(self._clock(), self._answered + seconds)
            self._heard.pardon(seconds)

    def _tell_once(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        if what not in self._told:
            self._told.add(what)
            write_beside_bars(f"rank {self.rank}: watching the other ranks met {what}; it goes on")

    def _judge(self) -> None:
        """End the job if a rank that this one listens to is silent, or if all of them wait for one that hangs."""
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
        """Ranks that are silent, as far as this one can tell: it must have heard of the others just now."""
        in_touch = self._clock() - self._answered < 4 * _POLL_S
        return self._silent(_DEAD_S) if in_touch else []

    def tick(self) -> None:
        """Notice what the other thread cannot while the store keeps it waiting; called often by one that never waits.

        That is the store's own silence, and the end of processes on this machine.
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
        for other in self._neighbours.gone:
            self._fallen.setdefault(other, now)
        fallen = next((other for other, at in self._fallen.items() if now - at >= _GRACE_S), None)
        if fallen is None or bounded(lambda: self._store.add("finished", 0), ASK_S) == self.world_size:
            return
        beats = bounded(lambda: self._exchange.read([fallen]), ASK_S)
        if beats:  # else the store has gone as well, which the other thread tells
            self.fail(killed_line(fallen, beats[fallen]), Verdict(dead=(fallen,)))

    def _store_is_silent(self, silence: float) -> None:
        if self._lost_store is not None and self._launcher_stopped():
            self._go_on_alone("the launcher that keeps the ranks in touch was stopped (SIGSTOP, Ctrl-Z)")
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
        """Who is missing, after a connection to another rank broke; a rank that fails is given time to say so.

        A process of this machine that has ended is known to be the one; one that lives is not. Of the ranks of other
        machines, it is one that does not beat any more; it may just be slow, and is not to be killed for that.
        """
        before = bounded(lambda: self._exchange.read(self._others), _LOST_S) if self._exchange.met else None
        end = self._clock() + _LOST_S
        while self._clock() < end:
            if bounded(lambda: self._store.check(["claim"]), ASK_S):
                self._last_word.follow()
            time.sleep(0.1)
        after = bounded(lambda: self._exchange.read(self._others), _LOST_S)
        gone = self._neighbours.gone
        if gone:
            return killed_line(gone[0], (after or self._heard.beats).get(gone[0])), Verdict(dead=tuple(gone))
        if not before or not after:
            return line, verdict
        still = [other for other in self._others if after[other].count == before[other].count]
        missing = [other for other in still if other not in self._neighbours]
        if not missing:
            return line, verdict
        self._absent = set(missing)
        return lost_line(missing[0], after[missing[0]]), verdict

    def _living(self, dead: Sequence[int]) -> list[int]:
        silent = self._heard.silent(6 * _POLL_S)
        gone = {*dead, *self._absent, *self._neighbours.gone, *silent, self.rank}
        return [other for other in range(self.world_size) if other not in gone]

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = self._clock() + seconds
        while not reached() and self._clock() < end:
            time.sleep(0.1)

    def _call(self, method: str, *arguments: Any) -> Any:
        """A call to the store; without the store there is no job left, and this process ends.

        But for a launcher's, without which ranks can do their last step, and for a rank that is at its end anyway.
        """
        try:
            # Of each call to a store that has gone, torch would write pages of C++ frames.
            return _NOTHING[method] if self._own_end else getattr(self._store, method)(*arguments)
        except RuntimeError:
            if self._own_end:
                return _NOTHING[method]
            if self._lost_store is None:
                self._speak_for_machine(killed_line(0, self._heard.beats.get(0)), Verdict(dead=(0,)))
            self._go_on_alone("the launcher that keeps the ranks in touch has ended")
            return _NOTHING[method]

    def _count(self, name: str, more: int) -> int:
        """A counter on the store, raised; 0 once this rank is alone: a store that was stopped answers nobody."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(self._call("add", name, more)), daemon=True)
        thread.start()
        while thread.is_alive() and not self.alone:
            thread.join(0.1)
        return found[0] if found else 0

    def _speak_for_machine(self, line: str, verdict: Verdict) -> NoReturn:
        """Without a store: the lowest living rank of each machine speaks, for they cannot agree on one any more."""
        dead = {*verdict.dead, *self._neighbours.gone}
        speaks = not any(other < self.rank and other not in dead for other in self._neighbours)
        self._own_end = True
        self._last_word.speak(line, verdict, at_once=True, speaks=speaks)

    def _bury(self, verdict: Verdict, line: str, speaks: bool) -> None:
        """End dead ranks of this machine: a stopped process hears of nothing else.

        And write the end into ``status.json`` if the rank that keeps it is one of them; the rank that speaks does.
        """
        for other in verdict.dead:
            self._neighbours.kill(other)
        first = self._heard.beats.get(0)
        if speaks and 0 in verdict.dead and first is not None and ACTIVITY.folder is not None:
            fail_in_place_of(ACTIVITY.folder, first.host, first.pid, line.removeprefix("error: "))


# What calls to a store that is no longer needed stand for.
_NOTHING: dict[str, Any] = {"add": 0, "check": False, "set": None, "multi_get": [], "get": None}
