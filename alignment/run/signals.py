"""Signals and the loss of launchers: a thread receives them while the main thread waits in a collective.

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
from functools import partial
from types import FrameType
from typing import Any

from alignment.run.activity import ACTIVITY
from alignment.run.launchers import Launcher, launchers
from alignment.run.processes import Watched
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
    """Turns signals into requests.

    Args:
        requests: receives the requests.
        end: called in the thread to exit immediately: after a second Ctrl-C, or if the main thread does not respond.
        tell: called in the thread with a message for the user when a request has to wait.
        each_tick: called in the thread twice a second.
        clock: clock in seconds.
    """

    def __init__(
        self,
        requests: StopRequests,
        end: Callable[[StopReason], Any],
        *,
        tell: Callable[[str], None] = lambda text: None,
        each_tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self._end, self._tell, self._each_tick, self._clock = requests, end, tell, each_tick, clock
        self._first_interrupt: float | None = None
        self._deadline: float | None = None
        self._raised = False
        self._announced: StopReason | None = None
        self._taken: set[int] = set()
        self._finishing_told = False
        self._failures: set[str] = set()
        self._launchers: dict[int, tuple[Launcher, Watched]] = {}

    @contextlib.contextmanager
    def listening(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
        """Within this context, signals become requests; call it in the main thread.

        SIGINT and SIGHUP stay ignored if they were ignored before. Handlers that are set within the context stay.
        """
        handlers = {each: signal.getsignal(each) for each in signals}
        taken = [each for each, handler in handlers.items() if not (each in _IGNORABLE and handler == signal.SIG_IGN)]
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._taken = set(taken)
        for each in taken:
            signal.signal(each, self._handle)
        _listening.append(self)
        self._watch_launchers()
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(reader, over), name="alignment-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            _listening.remove(self)
            # Stop the thread first: it must not handle signals once the previous handlers are restored.
            over.set()
            os.write(writer, _WAKE)
            thread.join(2 * _TICK_S)
            for each in taken:
                if signal.getsignal(each) == self._handle:
                    signal.signal(each, handlers[each] or signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            os.close(writer)

    def _watch_launchers(self) -> None:
        for launcher in launchers():
            self._launchers[launcher.pid] = (launcher, Watched.begin(launcher.pid))

    def launcher_stopped(self) -> bool:
        """Whether a launcher of this process is suspended."""
        return any(watched.stopped for _, watched in list(self._launchers.values()))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread, unless it checks for requests by itself."""
        self.requests.request(StopReason.of_signal(number))
        if self.requests.deferring or self._raised or self.requests.done:
            return
        self._raised, self._deadline = True, self._clock() + _CLEAN_UP_S
        reason = self.requests.reason or StopReason.of_signal(number)
        raise RunStopped(reason, self._interrupted(reason), everywhere=False)

    def _interrupted(self, reason: StopReason) -> str:
        detail = f" ({self.requests.detail})" if self.requests.detail else ""
        return f"{reason.state} by {reason.name}{detail} in phase {ACTIVITY.phase}; no training step was in progress"

    def _run(self, reader: int, over: threading.Event) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        for _, watched in self._launchers.values():
            if watched.descriptor is not None:
                poll.register(watched.descriptor, select.POLLIN)
        while not over.is_set():
            ready = {descriptor for descriptor, _ in poll.poll(_TICK_S * 1000)}
            # A failure in one part, such as a closed terminal, does not affect the others.
            parts = (partial(self._read, reader, ready), partial(self._miss, ready, poll), self._insist, self._tick)
            for part in parts:
                if not over.is_set():
                    self._survive(part)
        os.close(reader)
        for _, watched in self._launchers.values():
            watched.close()

    def _survive(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if what not in self._failures:
                self._failures.add(what)
                with contextlib.suppress(Exception):
                    self._tell(f"monitoring signals raised {what}; monitoring continues")

    def _read(self, reader: int, ready: set[int]) -> None:
        if reader in ready:
            for number in os.read(reader, 64):
                self._hear(number)

    def _miss(self, ready: set[int], poll: select.poll) -> None:
        """Detect launchers that have exited."""
        for launcher, watched in list(self._launchers.values()):
            if watched.descriptor in ready or (watched.descriptor is None and watched.gone):
                if watched.descriptor is not None:
                    poll.unregister(watched.descriptor)
                del self._launchers[launcher.pid]
                self.lost(f"the launcher {launcher.name} (process {launcher.pid}) has exited")

    def _tick(self) -> None:
        if self.requests.deferring and not self.requests.done:
            self._announce()  # a request on another rank, or the file STOP
        self._each_tick()

    def lost(self, what: str) -> None:
        """A launcher has exited before its ranks: nothing would end them, and they would collide with the next start.

        The ranks act as after SIGTERM.

        Args:
            what: description of the loss.
        """
        if self.requests.done:
            return
        self.requests.request(StopReason.SIGTERM, what)
        if self.requests.deferring:
            self._announce()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _hear(self, number: int) -> None:
        if number not in self._taken or not self._handles(number):  # belongs to another handler
            return
        reason = StopReason.of_signal(number)
        now = self._clock()
        if reason is StopReason.SIGINT:
            if self._first_interrupt is not None and now - self._first_interrupt >= _AGAIN_S:
                self._end(reason)
            self._first_interrupt = now if self._first_interrupt is None else self._first_interrupt
        self.requests.request(reason)
        if self.requests.done:
            self._tell_finishing(reason)
        elif not self.requests.deferring:
            self._deadline = self._deadline or now + _LEAVE_S
        else:
            self._announce()

    def _handles(self, number: int) -> bool:
        return bool(signal.getsignal(number) == self._handle)

    def _tell_finishing(self, reason: StopReason) -> None:
        if reason is StopReason.SIGINT and not self._finishing_told:
            self._finishing_told = True
            self._tell("SIGINT: the run is already finishing; press Ctrl-C again to exit immediately")

    def _announce(self) -> None:
        """Announce that the run will stop, unless this reason has been announced before."""
        reason, said = self.requests.reason, self._announced
        self._announced = reason
        if reason is not None and reason is not said:
            detail = f" ({self.requests.detail})" if self.requests.detail else ""
            again = "; press Ctrl-C again to exit immediately" if reason is StopReason.SIGINT else ""
            self._tell(f"{reason.name}{detail}: saving a checkpoint at the next safe point, then stopping{again}")

    def _insist(self) -> None:
        """Exit if the main thread was interrupted and does not respond."""
        if self._deadline is None or self._clock() < self._deadline:
            return
        self._deadline = None
        if self.requests.deferring or self.requests.done:  # it checks for requests by itself now
            return
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
    """Ignore stop signals in a data loader worker, which feeds the step in progress; its parent ends it.

    Args:
        worker: number of the worker.
    """
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
