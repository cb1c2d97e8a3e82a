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
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from types import FrameType

from alignment.run.activity import ACTIVITY
from alignment.run.ending import write_beside_bars
from alignment.run.processes import Process, launchers
from alignment.run.requests import REQUESTS
from alignment.run.stop import RunStopped, StopReason

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_AGAIN_S = 2.0  # launchers and schedulers repeat signals; a second SIGINT counts after this
_TICK_S = 0.5
_WAKE = b"\0"  # not a signal number


class SignalWatch:
    """Turns signals, and the end of a launcher, into requests to stop.

    Its thread calls ``each_tick`` twice a second, and ``end`` after a second Ctrl-C, to exit immediately.
    """

    def __init__(self, end: Callable[[], object], each_tick: Callable[[], None] = lambda: None) -> None:
        self._end, self._each_tick = end, each_tick
        self._interrupted: float | None = None  # the first SIGINT
        self._raised = False
        self._announced: StopReason | None = None
        self._taken: set[signal.Signals] = set()

    @contextlib.contextmanager
    def listening(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
        """Within this context, signals become requests. Outside of the main thread, only launchers are watched.

        Signals that were ignored before stay ignored, as under `nohup`. Handlers that are set within the context stay.
        """
        in_main = threading.current_thread() is threading.main_thread()
        before = {each: signal.getsignal(each) for each in signals} if in_main else {}
        self._taken = {each for each, old in before.items() if old != signal.SIG_IGN}
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if in_main else -1
        for each in self._taken:
            signal.signal(each, self._handle)
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(reader, over), name="alignment-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Stop the thread first: it must not handle signals once the previous handlers are restored.
            over.set()
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                os.write(writer, _WAKE)
            thread.join(2 * _TICK_S)
            for each in self._taken:
                if signal.getsignal(each) == self._handle:
                    signal.signal(each, before[each] or signal.SIG_DFL)
            if in_main:
                signal.set_wakeup_fd(wakeup)
            os.close(writer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread, unless it checks for requests by itself."""
        REQUESTS.request(StopReason.of_signal(number))
        if REQUESTS.deferring or self._raised or REQUESTS.done:
            return
        self._raised = True
        reason = REQUESTS.reason or StopReason.of_signal(number)
        text = f"{reason.state} by {REQUESTS} in phase {ACTIVITY.phase}; no training step was in progress"
        raise RunStopped(reason, text, everywhere=False)

    def _run(self, reader: int, over: threading.Event) -> None:
        poll, above = select.poll(), launchers()
        poll.register(reader, select.POLLIN)
        while not over.is_set():
            if poll.poll(_TICK_S * 1000) and not over.is_set():
                for number in os.read(reader, 64):
                    self._hear(number)
            with contextlib.suppress(OSError):  # such as too many open files, which may pass
                for launcher in [each for each in above if each.state == "gone"]:
                    self._lose(launcher, above.pop(launcher))
                self._announce()  # also a request on another rank, or the file STOP
                self._each_tick()
        os.close(reader)

    def _lose(self, launcher: Process, name: str) -> None:
        """Act as after SIGTERM because a launcher has exited before its ranks: nothing else would end them."""
        if not REQUESTS.done:
            REQUESTS.request(StopReason.SIGTERM, f"the launcher {name} (process {launcher.pid}) has exited")
            if not REQUESTS.deferring and signal.SIGTERM in self._taken:
                os.kill(os.getpid(), signal.SIGTERM)

    def _hear(self, number: int) -> None:
        if number not in self._taken or signal.getsignal(number) != self._handle:  # belongs to another handler
            return
        reason, now = StopReason.of_signal(number), monotonic()
        REQUESTS.request(reason)
        if reason is StopReason.SIGINT:
            self._interrupted = self._interrupted or now
            if now - self._interrupted >= _AGAIN_S:
                self._end()

    def _announce(self) -> None:
        """Announce that the run will stop, unless this reason has been announced before."""
        reason = REQUESTS.reason
        if REQUESTS.deferring and not REQUESTS.done and reason not in (None, self._announced):
            self._announced = reason
            again = "; press Ctrl-C again to exit immediately" if reason is StopReason.SIGINT else ""
            write_beside_bars(f"{REQUESTS}: saving a checkpoint at the next safe point, then stopping{again}")


def _detach_child() -> None:
    """Keep a forked worker from writing its signals into its parent's pipe; its parent decides when it ends."""
    for each in STOP_SIGNALS:
        if getattr(signal.getsignal(each), "__func__", None) is SignalWatch._handle:
            signal.set_wakeup_fd(-1)
            signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)


os.register_at_fork(after_in_child=_detach_child)


def ignore_stop_signals(worker: int = 0) -> None:
    """Ignore stop signals in a data loader worker, which feeds the step in progress; its parent ends it."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
