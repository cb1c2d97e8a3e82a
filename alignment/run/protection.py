"""The protection of a run: signals become requests to stop, ranks watch each other, and a hang ends the job.

A command enters it with :func:`protecting_command`. ``train()`` and ``evaluate()`` enter :func:`protected`, which does
the rest within a command, and everything in a script of the user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from alignment.config.errors import AlignmentError
from alignment.internals.torch import default_store
from alignment.run.activity import ACTIVITY
from alignment.run.deadlines import bounded
from alignment.run.ending import Ending, end_with, write_beside_bars
from alignment.run.failures import describe, exit_code, is_lost_peer
from alignment.run.peers import Peers
from alignment.run.ranks import rank, world_size
from alignment.run.requests import REQUESTS
from alignment.run.signals import STOP_SIGNALS, SignalWatch
from alignment.run.stacks import DeadManSwitch, write_stacks
from alignment.run.stop import RunStopped, StopReason

_FIRST_S = 30.0  # for the first heartbeat of a rank that has joined
_MARGIN_S = 5.0  # until the dead-man switch acts, a rank that can run Python reports the hang
_LATER_S = 2.0
_TICK_S = 0.5
_FOR_EVER = timedelta(days=1)  # an unresponsive store is detected by the clock, not by torch
_current: Protection | None = None
_sections = 0


class Protection:
    """What protects a run in this process.

    Args:
        in_command: whether a command runs, which a hang always ends. A single process that Python code has started,
            such as a notebook, only writes its stack traces.

    Attributes:
        signals: receives signals.
        peers: the other ranks, once they have joined; None in a single process.
        switch: the dead-man switch, within ``train()`` and ``evaluate()``.
    """

    def __init__(self, *, in_command: bool) -> None:
        self.peers: Peers | None = None
        self.switch: DeadManSwitch | None = None
        self.signals = SignalWatch(REQUESTS, self._end_now, tell=_tell, each_tick=self._tick)
        self._in_command, self._told = in_command, False
        self._mark, self._moved = -1, time.monotonic()  # progress of all ranks, and when it last changed

    def watch_ranks(self, first_s: float = _FIRST_S) -> None:
        """Start to exchange heartbeats with the other ranks, which have joined the process group."""
        global _sections
        _sections += 1
        if world_size() == 1:
            return
        from torch.distributed import PrefixStore

        # torch would retry a connection that a signal interrupts for up to 30 s, and ignore signals meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS))
        try:
            self._server = default_store()  # that of rank 0 may serve the others, and outlives the group
            # A separate connection, so that polling never waits for the main thread; torch's stubs lack the method.
            store = self._server.clone()  # type: ignore[attr-defined]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        store.set_timeout(_FOR_EVER)
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.peers = Peers(
            PrefixStore(f"alignment.run/{_sections}", store),
            rank(),
            world_size(),
            first_s=first_s,
            lost_launcher=self.signals.lost if by_launcher else None,
        )
        self.peers.begin()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Within this context, the dead-man switch is armed."""
        exits = self._in_command or world_size() > 1
        switch = DeadManSwitch(rank(), exits=exits, folder=lambda: ACTIVITY.folder)
        switch.keep("armed", ACTIVITY.limit + _MARGIN_S)  # the interpreter lock may be held before the first tick
        self.switch = switch
        try:
            yield
        finally:
            self.switch = None
            switch.disarm()

    def end(self, ending: Ending, *, trace: str = "", lost: bool = False) -> NoReturn:
        """Exit with all ranks; see :meth:`Peers.end`."""
        if self.peers is None:
            end_with(ending, trace=trace)
        self.peers.end(ending, trace=trace, lost=lost)

    def _end_now(self, reason: StopReason) -> NoReturn:
        line = f"{reason.state} immediately by {reason.name} in phase {ACTIVITY.phase} after step {ACTIVITY.step}"
        self.end(Ending(line, reason.code, reason.state, reason.name))

    def _tick(self) -> None:
        """Watch the progress of all ranks; called twice a second by the thread that receives signals."""
        suspended, now = ACTIVITY.tick(), time.monotonic()
        peers = None if self.peers is None or self.peers.alone else self.peers
        if REQUESTS.deferring:
            bounded(REQUESTS.asked, _TICK_S)  # main threads may wait for each other while the file STOP appears
        if peers is not None:
            peers.tick(suspended)
        mark, limit = (ACTIVITY.count, ACTIVITY.limit) if peers is None else (peers.progress, peers.limit)
        if mark != self._mark:
            self._mark, self._moved, self._told = mark, now, False
        self._moved = min(now, self._moved + suspended)
        switch = self.switch
        if switch is not None:
            switch.keep(mark, limit + _MARGIN_S)
        # Rank 0 first: it knows where all ranks are.
        if now - self._moved > limit + (_LATER_S if rank() else 0.0) and not self._told:
            self._report_hang(now - self._moved, peers)

    def _report_hang(self, idle: float, peers: Peers | None) -> None:
        self._told = True
        who = f"this process (host {socket.gethostname()}) in {ACTIVITY.place}" if peers is None else peers.places
        line = f"no progress for {idle:.0f} s (hang_timeout, hang_timeout_first): {who}; stack traces: hang-RANK.txt"
        if self._in_command or self.peers is not None:
            self.end(Ending(f"error: {line}", stacks=True))
        _tell(f"warning: {line}")
        write_stacks(ACTIVITY.folder, rank())


def _tell(text: str) -> None:
    if rank() == 0:
        write_beside_bars(text)


@contextlib.contextmanager
def protecting_command() -> Iterator[Protection]:
    """Within this context, a command is protected: its errors, and a hang at any time, end all ranks."""
    global _current
    ACTIVITY.reset()
    ACTIVITY.guarded = True
    protection = _current = Protection(in_command=True)
    try:
        with protection.signals.listening():
            yield protection
    finally:
        _current = None
        ACTIVITY.reset()
        REQUESTS.forget()


@contextlib.contextmanager
def protected(folder: Path) -> Iterator[None]:
    """Within this context, a call of ``train()`` or ``evaluate()`` on every rank is protected.

    Within a command, this only arms the dead-man switch. In a script, SIGTERM, SIGHUP and SIGUSR1 also request a stop
    unless they have other handlers (Ctrl-C keeps Python's behavior), and the ranks watch each other: if one of them
    dies, hangs or leaves with an exception that the others do not raise, the others exit.

    Args:
        folder: the output folder, for stack traces.
    """
    global _current
    if _current is not None:
        with contextlib.nullcontext() if _current.switch is not None else _current.armed():
            yield
        return
    free = [each for each in STOP_SIGNALS if signal.getsignal(each) == signal.SIG_DFL]  # not SIGINT
    protection = _current = Protection(in_command=False)
    ACTIVITY.begin_watch()
    ACTIVITY.folder, before = ACTIVITY.folder or folder, ACTIVITY.folder
    try:
        with protection.signals.listening(free), protection.armed():
            protection.watch_ranks(float("inf"))
            try:
                yield
            except BaseException as error:
                if protection.peers is not None:
                    protection.peers.fail(ending_of(error)[0], lost=is_lost_peer(error))
                raise
            if protection.peers is not None:
                protection.peers.finish()
    finally:
        _current, ACTIVITY.folder = None, before
        REQUESTS.forget()


def ending_of(error: BaseException) -> tuple[Ending, str]:
    """Return why a job ends with this error, and the traceback to show if the error is a bug."""
    reason = error.reason if isinstance(error, RunStopped) else None
    reason = StopReason.SIGINT if isinstance(error, KeyboardInterrupt) else reason
    line, is_defect = (error.message, False) if isinstance(error, RunStopped) else describe(error)
    if line and not isinstance(error, RunStopped):
        who = f"rank {rank()}: " if world_size() > 1 else ""
        if who and not isinstance(error, AlignmentError):  # whose message says where
            who = f"rank {rank()} in {ACTIVITY.place}: "
        line = f"error: {who}{line}"
    trace = "".join(traceback.format_exception(error)) if is_defect else ""
    if reason is not None:
        return Ending(line, reason.code, reason.state, reason.name), trace
    return Ending(line, exit_code(error)), trace
