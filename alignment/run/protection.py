"""The protection of a run: signals become requests to stop, ranks watch each other, and a hang ends the job.

A command enters it with :func:`protecting_command`. ``train()`` and ``evaluate()`` enter :func:`protected`, which does
the rest within a command, and everything in a script of the user.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from alignment.config.options_faults import FaultOptions
from alignment.internals.torch import default_store
from alignment.run.activity import ACTIVITY
from alignment.run.deadlines import bounded
from alignment.run.ending import Ending, end_with, ending_of, write_beside_bars
from alignment.run.peers import Peers
from alignment.run.ranks import rank, world_size
from alignment.run.requests import REQUESTS
from alignment.run.signals import STOP_SIGNALS, SignalWatch
from alignment.run.stacks import DeadManSwitch, write_stacks
from alignment.run.stop import RunStopped, StopReason

_MARGIN_S = 5.0  # until the dead-man switch acts, a rank that can run Python reports the hang
_LATER_S = 2.0
_ASK_S = 0.5
_SECTIONS = itertools.count()  # whose heartbeats do not mix
_current: Protection | None = None


class Protection:
    """What protects a run in this process; ``peers`` are the other ranks, once they have joined.

    A hang ends a command (``in_command``) and several ranks. A single process that Python code has started, such as a
    notebook, only writes its stack traces.
    """

    def __init__(self, *, in_command: bool) -> None:
        self.peers: Peers | None = None
        self.switch: DeadManSwitch | None = None
        self.signals = SignalWatch(self._end_now, self._tick)
        self._in_command, self._told = in_command, False
        self._mark, self._moved = -1, ACTIVITY.now  # progress of all ranks, and when it last changed

    def watch_ranks(self) -> None:
        """Start to exchange heartbeats with the other ranks, which have joined the process group."""
        prefix = f"alignment.run/{next(_SECTIONS)}"
        if world_size() == 1:
            return
        from torch.distributed import PrefixStore

        self._server = default_store()  # that of rank 0 may serve the others, and outlives the group
        # A separate connection, so that polling never waits for the main thread; torch's stubs lack the method.
        store = self._server.clone()  # type: ignore[attr-defined]
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.peers = Peers(PrefixStore(prefix, store), rank(), world_size(), by_launcher=by_launcher)
        self.peers.start()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Within this context, the dead-man switch is armed."""
        self.switch = switch = DeadManSwitch(rank(), exits=self._in_command or world_size() > 1)
        switch.keep("armed", ACTIVITY.limit + _MARGIN_S)  # the interpreter lock may be held before the first tick
        try:
            yield
        finally:
            self.switch = None
            switch.disarm()

    def end(self, ending: Ending) -> NoReturn:
        """Exit with all ranks; see :meth:`Peers.end`."""
        if self.peers is None:
            end_with(ending)
        self.peers.end(ending)

    def _end_now(self) -> NoReturn:
        line = f"stopped immediately by SIGINT in phase {ACTIVITY.phase} after step {ACTIVITY.step}"
        self.end(Ending.by_request(StopReason.SIGINT, line))

    def _tick(self) -> None:
        """Watch the progress of all ranks; called twice a second by the thread that receives signals."""
        ACTIVITY.tick()
        if REQUESTS.deferring:
            bounded(REQUESTS.asked, _ASK_S)  # main threads may wait for each other while the file STOP appears
        peers, mark, limit = self.peers, ACTIVITY.count, ACTIVITY.limit
        who = f"this process (host {socket.gethostname()}) in {ACTIVITY.place}"
        if peers is not None and not peers.over.is_set():
            peers.check_store()
            mark, limit, who = peers.progress, peers.limit, peers.places
        if mark != self._mark:
            self._mark, self._moved, self._told = mark, ACTIVITY.now, False
        switch = self.switch
        if switch is not None:
            switch.keep(mark, limit + _MARGIN_S)
        idle = ACTIVITY.now - self._moved
        if self._told or idle <= limit + (_LATER_S if rank() else 0.0):  # rank 0 knows where all ranks are
            return
        self._told = True
        line = f"no progress for {idle:.0f} s (hang_timeout, hang_timeout_first): {who}; stack traces: hang-RANK.txt"
        if self._in_command or peers is not None:
            self.end(Ending(f"error: {line}", stacks=True))
        write_beside_bars(f"warning: {line}")
        write_stacks(ACTIVITY.folder, rank())


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
def protected(folder: Path, limits: FaultOptions) -> Iterator[None]:
    """Within this context, a call of ``train()`` or ``evaluate()`` on every rank is protected.

    Within a command, this only arms the dead-man switch. In a script, SIGTERM, SIGHUP and SIGUSR1 also request a stop
    unless they have other handlers (Ctrl-C keeps Python's behavior), and the ranks watch each other: if one of them
    dies, hangs or leaves with an exception that the others do not raise, the others exit.

    Args:
        folder: the output folder, for stack traces.
        limits: how long a phase may go without progress, and a rank without a heartbeat.
    """
    global _current
    if _current is not None and _current.switch is not None:
        yield
        return
    ACTIVITY.folder, ACTIVITY.limits = folder, limits
    if _current is not None:
        with _current.armed():
            yield
        return
    ACTIVITY.forget_durations()  # of another run of this script
    free = [each for each in STOP_SIGNALS if signal.getsignal(each) == signal.SIG_DFL]  # not SIGINT
    protection = _current = Protection(in_command=False)
    try:
        with protection.signals.listening(free), protection.armed():
            protection.watch_ranks()
            try:
                yield
                if protection.peers is not None:
                    protection.peers.leave()
            except BaseException as error:
                if protection.peers is not None:
                    # All ranks raise it, and may still have output to write.
                    everywhere = isinstance(error, RunStopped) and error.everywhere
                    protection.peers.leave(None if everywhere else _failure(error))
                raise
    finally:
        _current = None
        ACTIVITY.folder = None
        REQUESTS.forget()


def _failure(error: BaseException) -> Ending:
    """Return why this rank of a script leaves the others, which cannot continue without it."""
    ending = ending_of(error)
    if ending.code:
        return ending
    return replace(ending, code=1, line=f"error: rank {rank()} in {ACTIVITY.place} exited with status 0")
