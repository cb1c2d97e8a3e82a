"""This rank's line to the others: who lives, who has failed, who has finished.

Ranks talk over the process group's store. Each says twice a second what it is doing; the first rank listens to all of
them and the others listen to the first, so that the traffic grows with the number of ranks and no faster. Whoever
finds that the job cannot go on claims the right to say so. The others fall silent, let it write its line, and end with
its exit status.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from alignment.engines.watch.beats import Beat, Gap, Heard, Pulse, hung_rank
from alignment.engines.watch.ending import bounded, mute
from alignment.engines.watch.last_word import ASK_S, LastWord, Verdict
from alignment.engines.watch.processes import Watched
from alignment.reporting.activity import ACTIVITY
from alignment.reporting.status_file import fail_in_place_of

_POLL_S = 0.5  # between two beats
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
        self._pulse, self._heard = Pulse(), Heard(clock)
        self._gap, self._last_word = Gap(clock), LastWord(store, rank, self._bury)
        self._own_end = self._met = self.alone = False
        self._answered = clock()
        self._neighbours: dict[int, Watched] = {}
        self._fallen: dict[int, float] = {}
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
        if self.alone:
            return
        if self.rank != 0:
            self._call("add", "left", 1)
            return
        self._wait(lambda: self._call("add", "left", 0) >= self.world_size - 1 - len(self._gone()), _LEAVE_S)

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
        self._own_end = True  # before the claim: the other thread must not take it for another rank's
        self._last_word.speak(line, verdict, lambda: self._living(verdict.dead), trace=trace, at_once=at_once)

    # The end of others -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The thread that beats and listens; it may wait for the store as long as the store likes."""
        while not self.alone:
            self._pardon_gap()
            if self._own_end:
                return
            if self._call("check", ["claim"]) and not self._own_end:
                self._last_word.follow()
            self._exchange()
            self._answered = self._clock()
            if not self._own_end:
                self._judge()
            self._over.wait(_POLL_S)

    def _exchange(self) -> None:
        """Beat, and hear the beats of those that this rank listens to."""
        self._call("set", f"beat/{self.rank}", self._pulse.beat().text())
        everyone = range(self.world_size)
        if not self._met:
            if not self._call("check", [f"beat/{other}" for other in everyone]):
                return
            for other, beat in self._read_beats(everyone).items():
                if other != self.rank and beat.machine == self._pulse.machine:
                    self._neighbours[other] = Watched.begin(beat.pid)
            self._met = True
        for other, beat in self._read_beats(everyone if self.rank == 0 else [0]).items():
            self._heard.hear(other, beat)

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        texts = self._call("multi_get", [f"beat/{other}" for other in ranks])
        return {other: Beat.parsed(text) for other, text in zip(ranks, texts, strict=True)} if texts else {}

    def _pardon_gap(self) -> None:
        """Where this process stood still, nobody else has been silent either."""
        seconds = self._gap.seconds()
        if seconds:
            self._answered += seconds
            self._heard.pardon(seconds)
            ACTIVITY.pardon(seconds)

    def _judge(self) -> None:
        """End the job if a rank that this one listens to is silent, or if all of them wait for one that hangs."""
        silence = ACTIVITY.limits.silence
        silent = [other for other in self._heard.silent(silence) if other != self.rank]
        if silent:
            beat = self._heard.beats[silent[0]]
            self.fail(
                f"error: rank {silent[0]} (host {beat.host}) has given no sign of life for {silence:g} s, last in "
                f"{beat.place}: it was stopped, or its host or the network is down (peer_timeout)",
                Verdict(dead=tuple(silent)),
            )
        if self.rank == 0 and len(self._heard.beats) == self.world_size:
            hung = hung_rank(self._heard.beats)
            if hung is not None:
                self.fail(hung_line(hung, self._heard.beats[hung], self.world_size), Verdict(hung=True))

    def tick(self) -> None:
        """Notice what the other thread cannot while the store keeps it waiting; called often by one that never waits.

        That is the store's own silence, and the end of processes on this machine.
        """
        self._pardon_gap()
        now = self._clock()
        if self._own_end or self.alone:
            return
        silence = ACTIVITY.limits.silence
        if now - self._answered > silence:
            self._store_is_silent(silence)
        self._notice_ends(now)

    def _notice_ends(self, now: float) -> None:
        for other, watched in self._neighbours.items():
            if other not in self._fallen and _ended(watched):
                self._fallen[other] = now
        fallen = next((other for other, at in self._fallen.items() if now - at >= _GRACE_S), None)
        if fallen is None or bounded(lambda: self._store.add("finished", 0), ASK_S) == self.world_size:
            return
        beats = bounded(lambda: self._read_beats([fallen]), ASK_S)
        if not beats:  # the store has gone as well, which the other thread tells
            return
        beat = beats[fallen]
        self.fail(
            f"error: rank {fallen} (host {beat.host}, process {beat.pid}) was killed in {beat.place}, perhaps for "
            "lack of host memory",
            Verdict(dead=(fallen,)),
        )

    def _store_is_silent(self, silence: float) -> None:
        if self._lost_store is not None and self._launcher_stopped():
            self._go_on_alone("the launcher that keeps the ranks in touch was stopped (SIGSTOP, Ctrl-Z)")
            return
        beat = self._heard.beats.get(0)
        what, place, dead = "the launcher, which", "", tuple[int, ...]()
        if self._lost_store is None:
            what, dead = f"rank 0{f' (host {beat.host})' if beat is not None else ''}, which", (0,)
            place = f", last in {beat.place}" if beat is not None else ""
        self._speak_for_machine(
            f"error: rank {self.rank} (host {self._pulse.host}): {what} keeps the ranks in touch, has given no answer "
            f"for {silence:g} s{place}: it was stopped, or its host or the network is down (peer_timeout)",
            Verdict(dead=dead),
        )

    def _go_on_alone(self, why: str) -> None:
        if not self.alone and self._lost_store is not None:
            self.alone = True
            self._lost_store(why)

    def _lost_peer(self, line: str, verdict: Verdict) -> tuple[str, Verdict]:
        """Who is missing, after a connection to another rank broke; a rank that fails is given time to say so."""
        everyone = [other for other in range(self.world_size) if other != self.rank]
        before = bounded(lambda: self._read_beats(everyone), _LOST_S) if self._met else None
        end = self._clock() + _LOST_S
        while self._clock() < end:
            if bounded(lambda: self._store.check(["claim"]), ASK_S):
                self._last_word.follow()
            time.sleep(0.1)
        after = bounded(lambda: self._read_beats(everyone), _LOST_S)
        if not before or not after:
            return line, verdict
        missing = [other for other in everyone if after[other].count == before[other].count]
        if not missing:
            return line, verdict
        beat = after[missing[0]]
        who = f"rank {missing[0]} (host {beat.host}, process {beat.pid})"
        return (
            f"error: {who} was killed or lost its network in {beat.place}; if it was killed, perhaps for lack of host "
            "memory",
            Verdict(dead=tuple(missing)),
        )

    def _living(self, dead: Sequence[int]) -> list[int]:
        gone = {*dead, *self._gone(), *self._heard.silent(6 * _POLL_S), self.rank}
        return [other for other in range(self.world_size) if other not in gone]

    def _gone(self) -> list[int]:
        return [other for other, watched in self._neighbours.items() if _ended(watched)]

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = self._clock() + seconds
        while not reached() and self._clock() < end:
            time.sleep(0.1)

    def _call(self, method: str, *arguments: Any) -> Any:
        """A call to the store; without the store there is no job left, and this process ends.

        But for a launcher's, without which ranks can do their last step, and for a rank that is at its end anyway.
        """
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError:
            if self._own_end:
                return _NOTHING[method]
            if self._lost_store is None:
                self._store_is_gone()
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

    def _store_is_gone(self) -> NoReturn:
        self._own_end = True
        beat = self._heard.beats.get(0)
        where = f" (host {beat.host}, process {beat.pid})" if beat is not None else ""
        place = f" in {beat.place}" if beat is not None else ""
        line = f"error: rank 0{where} was killed{place}, perhaps for lack of host memory"
        self._speak_for_machine(line, Verdict(dead=(0,)))

    def _speak_for_machine(self, line: str, verdict: Verdict) -> NoReturn:
        """Without a store: the lowest living rank of each machine speaks, for they cannot agree on one any more."""
        dead = {*verdict.dead, *self._gone()}
        if any(other < self.rank and other not in dead for other in self._neighbours):
            mute()
        self._own_end = True
        self._last_word.speak(line, verdict, list, trace="", at_once=True)

    def _bury(self, verdict: Verdict, line: str) -> None:
        """End dead ranks of this machine: a stopped process hears of nothing else.

        And write the end into ``status.json`` if the rank that keeps it is one of them.
        """
        for other in verdict.dead:
            if other in self._neighbours:
                self._neighbours[other].kill()
        first = self._heard.beats.get(0)
        if 0 in verdict.dead and first is not None and ACTIVITY.folder is not None:
            fail_in_place_of(ACTIVITY.folder, first.host, first.pid, line.removeprefix("error: "))


# What calls to a store that is no longer needed stand for.
_NOTHING: dict[str, Any] = {"add": 0, "check": False, "set": None, "multi_get": []}


def _ended(watched: Watched) -> bool:
    if watched.descriptor is None:
        return watched.gone
    return bool(select.select([watched.descriptor], [], [], 0)[0])


def hung_line(rank: int, beat: Beat, world_size: int) -> str:
    """The line about a rank that makes no progress."""
    who = f"rank {rank} (host {beat.host})" if world_size > 1 else f"this process (host {beat.host})"
    return (
        f"error: {who} has made no progress for {beat.idle:.0f} s in {beat.place} (hang_timeout, hang_timeout_first); "
        f"its stacks are in hang-{rank}.txt"
    )
