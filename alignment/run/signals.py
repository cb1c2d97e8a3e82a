"""Signals and the end of launchers: a thread receives them while the main thread waits in a collective.

A Python handler runs between two bytecodes of the main thread, which may be minutes later. The interpreter writes the
number of each signal into a pipe immediately, and the thread reads that pipe.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from alignment.run.activity import ACTIVITY
from alignment.run.launchers import launchers
from alignment.run.processes import Process
from alignment.run.requests import StopRequests
from alignment.run.stop import RunStopped, StopReason

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_IGNORABLE = (signal.SIGINT, signal.SIGHUP)  # by `nohup`, and by shells for background jobs
_AGAIN_S = 2.0  # launchers and schedulers repeat signals; a second SIGINT counts after this
_CLEAN_UP_S = 30.0  # for the main thread to end after an interrupt, which a broad `except` may have swallowed
_LEAVE_S = 3.0  # for the main thread to run the handler where it does not check for requests
_TICK_S = 0.5
_WAKE = b"\0"  # not a signal number


class SignalWatch:
    """Turns signals, and the end of a launcher, into requests to stop.

    Args:
        requests: receives the requests.
        end: called in the thread to exit immediately: after a second Ctrl-C, or if the main thread does not respond.
        tell: called in the thread with a message for the user.
        each_tick: called in the thread twice a second.
        clock: clock in seconds.
    """

    def __init__(
        self,
        requests: StopRequests,
        end: Callable[[StopReason], object],
        *,
        tell: Callable[[str], None] = lambda text: None,
        each_tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self._end, self._tell, self._each_tick, self._clock = requests, end, tell, each_tick, clock
        self._interrupted: float | None = None  # the first SIGINT
        self._deadline: float | None = None  # for the main thread to respond
        self._raised = False
        self._announced: StopReason | None = None
        self._taken: set[int] = set()

    @contextlib.contextmanager
    def listening(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
        """Within this context, signals become requests. Outside of the main thread, only launchers are watched.

        SIGINT and SIGHUP stay ignored if they were ignored before. Handlers that are set within the context stay.
        """
        in_main = threading.current_thread() is threading.main_thread()
        before = {each: signal.getsignal(each) for each in signals} if in_main else {}
        self._taken = {each for each, old in before.items() if not (each in _IGNORABLE and old == signal.SIG_IGN)}
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if in_main else -1
        for each in self._taken:
            signal.signal(each, self._handle)
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(reader, over), name="alignment-signals", daemon=True)
        _listening.append(self)
        thread.start()
        try:
            yield
        finally:
            _listening.remove(self)
            # Stop the thread first: it must not handle signals once the previous handlers are restored.
            over.set()
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                os.write(writer, _WAKE)
            thread.join(2 * _TICK_S)
            for each in self._taken:
                if signal.getsignal(each) == self._handle:
                    signal.signal(each, before[signal.Signals(each)] or signal.SIG_DFL)
            if in_main:
                signal.set_wakeup_fd(wakeup)
            os.close(writer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread, unless it checks for requests by itself."""
        self.requests.request(StopReason.of_signal(number))
        if self.requests.deferring or self._raised or self.requests.done:
            return
        self._raised, self._deadline = True, self._clock() + _CLEAN_UP_S
        reason = self.requests.reason or StopReason.of_signal(number)
        text = f"{reason.state} by {self.requests} in phase {ACTIVITY.phase}; no training step was in progress"
        raise RunStopped(reason, text, everywhere=False)

    def _run(self, reader: int, over: threading.Event) -> None:
        poll, above = select.poll(), [(each, Process.of(each.pid)) for each in launchers()]
        poll.register(reader, select.POLLIN)
        while not over.is_set():
            if poll.poll(_TICK_S * 1000) and not over.is_set():
                for number in os.read(reader, 64):
                    self._hear(number)
            for launcher, _ in [each for each in above if each[1].state == "gone"]:
                self.lost(f"the launcher {launcher.name} (process {launcher.pid}) has exited")
            above = [each for each in above if each[1].state != "gone"]
            self._insist()
            self._announce()  # also a request on another rank, or the file STOP
            self._each_tick()
        os.close(reader)

    def lost(self, what: str) -> None:
        """Act as after SIGTERM because a launcher has exited before its ranks: nothing else would end them."""
        if not self.requests.done:
            self.requests.request(StopReason.SIGTERM, what)
            if not self.requests.deferring and signal.SIGTERM in self._taken:
                os.kill(os.getpid(), signal.SIGTERM)

    def _hear(self, number: int) -> None:
        if number not in self._taken or signal.getsignal(number) != self._handle:  # belongs to another handler
            return
        reason, now = StopReason.of_signal(number), self._clock()
        self.requests.request(reason)
        if reason is StopReason.SIGINT:
            if self._interrupted is not None and now - self._interrupted >= _AGAIN_S:
                self._end(reason)
            if self._interrupted is None and self.requests.done:
                self._tell("SIGINT: the run is already finishing; press Ctrl-C again to exit immediately")
            self._interrupted = now if self._interrupted is None else self._interrupted
        if not (self.requests.done or self.requests.deferring):
            self._deadline = self._deadline or now + _LEAVE_S

    def _announce(self) -> None:
        """Announce that the run will stop, unless this reason has been announced before."""
        reason = self.requests.reason
        if self.requests.deferring and not self.requests.done and reason not in (None, self._announced):
            self._announced = reason
            again = "; press Ctrl-C again to exit immediately" if reason is StopReason.SIGINT else ""
            self._tell(f"{self.requests}: saving a checkpoint at the next safe point, then stopping{again}")

    def _insist(self) -> None:
        """Exit if the main thread was interrupted and does not respond."""
        if self._deadline is None or self._clock() < self._deadline:
            return
        self._deadline = None
        if not (self.requests.deferring or self.requests.done):  # otherwise it checks for requests by itself now
            self._end(self.requests.reason or StopReason.SIGTERM)

    def forget_in_child(self) -> None:
        """Detach a forked worker, which must not write its signals into its parent's pipe or raise at the parent's.

        Ctrl-C, a logout or a SLURM notice reaches every process of a group; the parent decides what happens to its
        workers.
        """
        with contextlib.suppress(ValueError):  # the forking thread is usually the child's main thread
            signal.set_wakeup_fd(-1)
        for each in STOP_SIGNALS:
            if signal.getsignal(each) == self._handle:
                signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)


_listening: list[SignalWatch] = []  # fork hooks cannot be unregistered and must not keep finished objects


def _after_fork() -> None:
    for watch in _listening:
        watch.forget_in_child()


os.register_at_fork(after_in_child=_after_fork)


def ignore_stop_signals(worker: int = 0) -> None:
    """Ignore stop signals in a data loader worker, which feeds the step in progress; its parent ends it."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
