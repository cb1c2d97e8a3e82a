"""Hearing at once of the end of processes that are not this one's children."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass

import psutil

from alignment.engines.checkpoints.owner import process_start


@dataclass
class Watched:
    """A process of this machine, as it was when the watch began; its number may be another's later.

    Attributes:
        pid: its number.
        descriptor: becomes readable when it ends; None where the kernel has no such thing.
    """

    pid: int
    descriptor: int | None
    _start: str | None

    @classmethod
    def begin(cls, pid: int) -> Watched:
        """Watch a process. It may have ended already."""
        try:
            descriptor: int | None = os.pidfd_open(pid)
        except (OSError, AttributeError):  # gone, an old kernel, or a sandbox
            descriptor = None
        return cls(pid, descriptor, process_start(pid))

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._start is None or process_start(self.pid) != self._start

    @property
    def ended(self) -> bool:
        """As :attr:`gone`, at less cost."""
        if self.descriptor is None:
            return self.gone
        poll = select.poll()  # select() takes no descriptor from 1024 on
        poll.register(self.descriptor, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    @property
    def stopped(self) -> bool:
        """Whether it stands still, as after SIGSTOP or Ctrl-Z."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def kill(self) -> None:
        """End it, stopped or not, if it is still there."""
        try:
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.gone:
                os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return  # it has ended, or is another user's

    def close(self) -> None:
        """End the watch."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
