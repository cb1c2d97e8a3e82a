"""The protection of a run: signals become requests to stop, ranks watch each other, and a hang ends the job.

A command enters it with :func:`protecting_command`. ``train()`` and ``evaluate()`` enter :func:`protected`, which does
the rest within a command, and everything in a script of the user.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn

import psutil

from alignment.config.options_faults import FaultOptions
from alignment.internals.torch import default_store
from alignment.run.activity import ACTIVITY
from alignment.run.ending import SWITCH, Ending, end_with, ending_of, write, write_stacks
from alignment.run.peers import Peers, state_of
from alignment.run.ranks import rank, world_size
from alignment.run.stop import REQUESTS, RunStopped, StopReason

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_AGAIN_S = 2.0  # launchers and schedulers repeat signals; a second SIGINT counts after this
_TICK_S = 0.5
_MARGIN_S = 5.0  # until the dead-man switch acts, a rank that can run Python reports the hang
# Programs that start ranks and monitor them, also as a script or module of an interpreter. Shells do not count: a
# `nohup … &` run outlives its shell. SLURM appends the step ID.
_LAUNCHER = re.compile(
    r"(\S*python\S* (-(?!c )\S+ )*)?(\S*/)?(torchrun|deepspeed(\.pt)?|ds|accelerate(-launch)?|slurmstepd|"
    r"torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.(launch|runner))(:\S*)?( |$)"
)
_SECTIONS = itertools.count()  # whose heartbeats do not mix
_current: Protection | None = None


def launchers() -> list[int]:
    """The process IDs of the launchers among the ancestors of this process."""
    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process().parents() if _LAUNCHER.match(" ".join(each.cmdline()))]
    return []


def _note(number: int, frame: FrameType | None) -> None:
    """Request a stop; a handler of signals, whose numbers the interpreter has written into the pipe."""
    REQUESTS.request(StopReason[signal.Signals(number).name])


class Protection:
    """A thread that receives signals, and twice a second looks for a reason to stop or to end this process.

    A Python handler runs between two bytecodes of the main thread, which may wait in a collective for minutes. The
    interpreter writes the number of each signal into a pipe immediately, and the thread reads that pipe.
    """

    def __init__(self) -> None:
        self.peers: Peers | None = None  # the other ranks, once they have joined
        self._interrupted: float | None = None  # the first SIGINT
        self._announced: StopReason | None = None
        self._mark, self._moved = -1, ACTIVITY.now  # progress of all ranks, and when it last changed

    @contextlib.contextmanager
    def active(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[Protection]:
        """Within this context, the thread runs and signals become requests, if this is the main thread.

        Signals that were ignored before stay ignored, as under `nohup`. Handlers that are set within the context stay.
        """
        global _current
        _current = self
        in_main = threading.current_thread() is threading.main_thread()
        before = {each: signal.getsignal(each) for each in signals} if in_main else {}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # as Python demands
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if in_main else -1
        for each, old in before.items():
            if old != signal.SIG_IGN:
                signal.signal(each, _note)
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(reader, over), name="alignment-signals", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            os.write(writer, b"\0")
            thread.join(2 * _TICK_S)
            for each, old in before.items():
                if signal.getsignal(each) is _note:
                    signal.signal(each, old or signal.SIG_DFL)
            if in_main:
                signal.set_wakeup_fd(wakeup)
            os.close(writer)
            _current = None
            REQUESTS.forget()

    def _run(self, reader: int, over: threading.Event) -> None:
        poll, above = select.poll(), launchers()
        poll.register(reader, select.POLLIN)
        while not over.is_set():
            if poll.poll(_TICK_S * 1000) and not over.is_set():
                for number in os.read(reader, 64):
                    self._hear(number)
            for launcher in [each for each in above if state_of(each) == "gone"]:  # nothing else would end the ranks
                REQUESTS.request(StopReason.SIGTERM, f"the launcher (process {launcher}) has exited")
            self._tick()
        os.close(reader)

    def _hear(self, number: int) -> None:
        if signal.getsignal(number) is _note:  # otherwise it belongs to another handler
            _note(number, None)
            if number == signal.SIGINT:
                self._interrupted = self._interrupted or monotonic()
                if monotonic() - self._interrupted >= _AGAIN_S:
                    line = f"stopped immediately by SIGINT in phase {ACTIVITY.phase} after step {ACTIVITY.step}"
                    self.end(Ending(line, StopReason.SIGINT.code, StopReason.SIGINT.state, StopReason.SIGINT.name))

    def _tick(self) -> None:
        ACTIVITY.tick()
        SWITCH.keep(ACTIVITY.limit + _MARGIN_S)
        if REQUESTS.reason is not None and not REQUESTS.done:  # also a request to another rank
            self._obey(REQUESTS.reason)
        if self.peers is not None and (ending := self.peers.verdict()) is not None:
            self.end(ending)
        if rank() == 0:  # it knows of the progress of all ranks
            self._check_progress()

    def _obey(self, reason: StopReason) -> None:
        """Announce that the main thread will stop, once for a reason; end this process if it does not check for it."""
        if not REQUESTS.deferring:
            what = f"{reason.state} by {REQUESTS} in phase {ACTIVITY.phase}; no training step was in progress"
            self.end(Ending(what, reason.code, reason.state, reason.name))
        if reason is not self._announced and rank() == 0:
            again = "; press Ctrl-C again to exit immediately" if reason is StopReason.SIGINT else ""
            write(f"{REQUESTS}: saving a checkpoint at the next safe point, then stopping{again}")
        self._announced = reason

    def _check_progress(self) -> None:
        """End the job if no rank has made progress for longer than any may; a notebook only gets stack traces."""
        mark, limit, who = ACTIVITY.count, ACTIVITY.limit, ACTIVITY.place
        if self.peers is not None:
            mark, limit, who = self.peers.progress()
        if mark != self._mark:
            self._mark, self._moved = mark, ACTIVITY.now
        idle = ACTIVITY.now - self._moved
        if idle > limit:
            line = f"no progress for {idle:.0f} s (hang_timeout, hang_timeout_first): {who}; stacks: hang-RANK.txt"
            if ACTIVITY.guarded or self.peers is not None:
                self.end(Ending(f"error: {line}", stacks=True))
            self._moved = math.inf  # it is reported once
            write(f"warning: {line}")
            write_stacks()

    def watch_ranks(self) -> None:
        """Start to exchange heartbeats with the other ranks, which have joined the process group."""
        if world_size() > 1:
            from torch.distributed import PrefixStore

            self._server = default_store()  # that of rank 0 may serve the others, and outlives the group
            # A separate connection, so that polling never waits for the main thread; torch's stubs lack the method.
            store = PrefixStore(f"alignment.run/{next(_SECTIONS)}", self._server.clone())  # type: ignore[attr-defined]
            self.peers = Peers(store, rank(), world_size())
            self.peers.start()

    def end(self, ending: Ending) -> NoReturn:
        """Exit with all ranks; see :meth:`Peers.end`."""
        if self.peers is None:
            end_with(ending)
        self.peers.end(ending)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the other ranks, once all have finished, or because this one has failed; see :meth:`Peers.leave`."""
        if self.peers is not None:
            stopped = isinstance(error, RunStopped)  # on all ranks, which may still have output to write
            self.peers.leave(None if error is None or stopped else ending_of(error))
            self.peers = None


@contextlib.contextmanager
def protecting_command() -> Iterator[Protection]:
    """Within this context, a command is protected: its errors, and a hang at any time, end all ranks."""
    ACTIVITY.reset()
    ACTIVITY.guarded = True
    with Protection().active() as protection:
        yield protection
    ACTIVITY.reset()


@contextlib.contextmanager
def protected(folder: Path, limits: FaultOptions) -> Iterator[None]:
    """Within this context, a call of ``train()`` or ``evaluate()`` on every rank is protected.

    Within a command, this only arms the dead-man switch. In a script, SIGTERM, SIGHUP and SIGUSR1 also request a stop
    unless they have other handlers (Ctrl-C keeps Python's behavior), and the ranks watch each other: if one of them
    dies, hangs or leaves with an exception that the others do not raise, the others exit.
    """
    ACTIVITY.folder, ACTIVITY.limits = folder, limits
    if _current is None:
        ACTIVITY.forget_durations()  # of another run of this script
    with SWITCH.armed(ACTIVITY.limit + _MARGIN_S, exits=ACTIVITY.guarded or world_size() > 1):
        if _current is not None:
            yield
            return
        free = [each for each in STOP_SIGNALS if signal.getsignal(each) == signal.SIG_DFL]  # not SIGINT
        with Protection().active(free) as protection, contextlib.ExitStack() as ranks:
            ranks.push(lambda kind, error, trace: protection.leave(error))
            protection.watch_ranks()
            yield


def _detach_child() -> None:
    """Keep a forked worker from writing its signals into its parent's pipe; its parent decides when it ends."""
    for each in STOP_SIGNALS:
        if signal.getsignal(each) is _note:
            signal.set_wakeup_fd(-1)
            signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)


os.register_at_fork(after_in_child=_detach_child)


def ignore_stop_signals(worker: int = 0) -> None:
    """Ignore stop signals in a data loader worker, which feeds the step in progress; its parent ends it."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
