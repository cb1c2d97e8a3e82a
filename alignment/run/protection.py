"""The protection of a run: signals become requests to stop, ranks watch each other, and a hang ends the job.

``train()`` and ``evaluate()`` enter it with :func:`protected`, unless they run within a command, which has entered it.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn

import psutil

from alignment.config.options_training import FaultOptions
from alignment.internals.torch import default_store
from alignment.run.activity import ACTIVITY
from alignment.run.ending import SWITCH, Ending, end_with, ending_of, write, write_stacks
from alignment.run.peers import Peers, state_of
from alignment.run.ranks import rank, world_size
from alignment.run.stop import REQUESTS, RunStopped, StopReason

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
_AGAIN_S = 2.0  # launchers and schedulers repeat signals; a second SIGINT counts after this
_TICK_S = 1.0  # also between two settings of the dead-man switch
_CAUSE_S = 2.5  # launchers also send SIGTERM after a rank was killed, which the other ranks notice until then
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
    found: list[int] = []
    with contextlib.suppress(psutil.Error, OSError):  # those of other users, which come last, may be hidden
        found.extend(each.pid for each in psutil.Process().parents() if _LAUNCHER.match(" ".join(each.cmdline())))
    return found


def _note(number: int, frame: FrameType | None) -> None:
    """Request a stop; a handler of signals. If the watching thread has called it, raise what that thread has set."""
    REQUESTS.request(StopReason[signal.Signals(number).name])
    if _current is not None and _current.stop is not None and not (REQUESTS.deferring or REQUESTS.done):
        stop, _current.stop = _current.stop, None
        raise stop


class Protection:
    """A thread that receives signals, and once a second looks for a reason to stop or to end this process.

    A Python handler runs between two bytecodes of the main thread, which may wait in a collective for minutes. The
    interpreter writes the number of each signal into a pipe immediately, and the thread reads that pipe.
    """

    def __init__(self) -> None:
        self.peers: Peers | None = None  # the other ranks, once they have joined
        self.end: Callable[[Ending], NoReturn] = end_with  # this process, or all ranks
        self.stop: RunStopped | None = None  # what interrupts the main thread
        self._interrupted, self._asked = 0.0, 0.0  # the first SIGINT, and the first request outside of training
        self._hangs = False  # whether a hang has been reported

    @contextlib.contextmanager
    def active(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[Protection]:
        """Within this context, the thread runs and signals become requests, if this is the main thread.

        Signals that were ignored before stay ignored, as under `nohup`. Handlers that are set within the context stay.
        """
        global _current
        _current = self
        in_main = threading.current_thread() is threading.main_thread()
        taken = [each for each in signals if in_main and signal.getsignal(each) != signal.SIG_IGN]
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # as Python demands
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if in_main else -1
        before = {each: signal.signal(each, _note) for each in taken}
        over, own = threading.Event(), os.getpid()
        thread = threading.Thread(target=self._run, args=(reader, over), name="alignment-signals", daemon=True)
        try:
            thread.start()
            yield self
        finally:
            over.set()
            if os.getpid() == own:  # not a forked child, which shares the pipe
                with contextlib.suppress(BrokenPipeError):  # the thread has looked meanwhile
                    os.write(writer, b"\0")
            thread.join(2 * _TICK_S)
            for each, old in before.items():
                if signal.getsignal(each) is _note:
                    signal.signal(each, old or signal.SIG_DFL)
            if in_main:
                signal.set_wakeup_fd(wakeup)
            os.close(writer)
            _current, REQUESTS.done = None, False
            ACTIVITY.forget_durations()  # which another run of this script does not have

    def _run(self, reader: int, over: threading.Event) -> None:
        try:
            poll, above = select.poll(), launchers()
            poll.register(reader, select.POLLIN)
            while not over.is_set():
                with contextlib.suppress(OSError):  # such as too many open files, which may pass
                    self._tick()
                    for launcher in [each for each in above if state_of(each) == "gone"]:
                        REQUESTS.request(StopReason.SIGTERM, f"the launcher (process {launcher}) has exited")
                for number in os.read(reader, 64) if poll.poll(_TICK_S * 1000) else b"":
                    if number and signal.getsignal(number) is _note:  # otherwise it belongs to another handler
                        self._hear(signal.Signals(number))
        except Exception as error:
            self.end(ending_of(error))
        os.close(reader)

    def _hear(self, number: signal.Signals) -> None:
        REQUESTS.request(StopReason[number.name])
        if number == signal.SIGINT:
            self._interrupted = self._interrupted or monotonic()
            if monotonic() - self._interrupted >= _AGAIN_S:
                line = f"stopped immediately by SIGINT in phase {ACTIVITY.phase} after step {ACTIVITY.step}"
                self.end(Ending(line, StopReason.SIGINT.code, number.name))

    def _tick(self) -> None:
        ACTIVITY.tick()
        SWITCH.keep(ACTIVITY.limit + _MARGIN_S)
        peers = self.peers  # the main thread may leave them meanwhile
        if peers is not None and (ending := peers.verdict()) is not None:
            peers.end(ending)
        if REQUESTS.reason is not None and not REQUESTS.done:  # also a request to another rank
            self._obey(REQUESTS.reason)
        idle, limit, who = (ACTIVITY.idle, ACTIVITY.limit, ACTIVITY.place) if peers is None else peers.progress()
        if idle > limit and not self._hangs and rank() == 0:  # which knows of the progress of all ranks
            line = f"no progress for {idle:.0f} s (hang_timeout, hang_timeout_first): {who}; stacks: hang-RANK.txt"
            if ACTIVITY.guarded or peers is not None:
                self.end(Ending(f"error: {line}", stacks=True))
            write(f"warning: {line}")  # a notebook continues
            write_stacks()
        self._hangs = idle > limit

    def _obey(self, reason: StopReason) -> None:
        """Announce that training will stop, or elsewhere, interrupt the main thread, once."""
        if REQUESTS.deferring:
            if self._asked < math.inf and rank() == 0:
                again = "; press Ctrl-C again to exit immediately" if reason is StopReason.SIGINT else ""
                write(f"{REQUESTS}: saving a checkpoint at the next safe point, then stopping{again}")
            self._asked = math.inf  # also if training ends with an error instead
        self._asked = self._asked or monotonic()
        ours = [each for each in STOP_SIGNALS if signal.getsignal(each) is _note]
        if ours and monotonic() - self._asked >= (0.0 if self.peers is None else _CAUSE_S):
            self._asked = math.inf
            what = f"{reason.state} by {REQUESTS} in phase {ACTIVITY.phase}; no training step was in progress"
            self.stop = RunStopped(reason, what)
            signal.pthread_kill(threading.main_thread().ident or 0, ours[0])

    def watch_ranks(self) -> None:
        """Start to exchange heartbeats with the other ranks, which have joined the process group."""
        if world_size() > 1:
            from torch.distributed import PrefixStore

            self._server = default_store()  # that of rank 0 may serve the others, and outlives the group
            # A separate connection, so that polling never waits for the main thread; torch's stubs lack the method.
            store = PrefixStore(f"alignment.run/{next(_SECTIONS)}", self._server.clone())  # type: ignore[attr-defined]
            self.peers = Peers(store, rank(), world_size())
            self.peers.start()
            self.end = self.peers.end

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the other ranks, once all have finished, or because this one has failed; see :meth:`Peers.leave`."""
        everywhere = isinstance(error, RunStopped) and REQUESTS.done  # and ranks may still have output to write
        REQUESTS.done = True
        if self.peers is not None:
            self.peers.leave(None if error is None or everywhere else ending_of(error))
            self.peers, self.end = None, end_with


@contextlib.contextmanager
def protected(folder: Path, limits: FaultOptions) -> Iterator[None]:
    """Within this context, a call of ``train()`` or ``evaluate()`` on every rank is protected.

    Within a command, this only arms the dead-man switch. In a script, SIGTERM, SIGHUP and SIGUSR1 also request a stop
    unless they have other handlers (Ctrl-C keeps Python's behavior), and the ranks watch each other: if one of them
    dies, hangs or leaves with an exception that the others do not raise, the others exit.
    """
    ACTIVITY.folder, ACTIVITY.limits = folder, limits
    with SWITCH.armed(ACTIVITY.limit + _MARGIN_S, exits=ACTIVITY.guarded or world_size() > 1):
        if _current is not None:
            yield
            return
        free = [each for each in STOP_SIGNALS if signal.getsignal(each) == signal.SIG_DFL]  # not SIGINT
        try:
            with Protection().active(free) as protection, contextlib.ExitStack() as ranks:
                ranks.push(lambda kind, error, trace: protection.leave(error))
                protection.watch_ranks()
                yield
        except RunStopped:
            REQUESTS.forget()  # this request was carried out; any other also stops the next call
            raise


def _detach_child() -> None:
    """Keep a forked worker from writing its signals into its parent's pipe; its parent decides when it ends."""
    for each in STOP_SIGNALS:
        if signal.getsignal(each) is _note:
            signal.set_wakeup_fd(-1)
            signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)
    if _current is not None:
        _current.peers = ACTIVITY.status = None


os.register_at_fork(after_in_child=_detach_child)


def ignore_stop_signals(worker: int = 0) -> None:
    """Ignore stop signals in a data loader worker, which feeds the step in progress; its parent ends it."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
