"""Immediate notification of the end of processes that are not children of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass

import psutil

from alignment.checkpoint.owner import process_start


@dataclass
class Watched:
    """A process of this machine, identified when the watch began; its PID may be reused later.

    Attributes:
        pid: process ID.
        descriptor: a descriptor that becomes readable when the process ends; None if the kernel does not support it.
    """

    pid: int
    descriptor: int | None
    _start: str | None

    @classmethod
    def begin(cls, pid: int) -> Watched:
        """Start watching a process, which may have ended already."""
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
        """Like :attr:`gone`, but cheaper."""
        if self.descriptor is None:
            return self.gone
        poll = select.poll()  # select() does not support descriptors of 1024 and above
        poll.register(self.descriptor, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    @property
    def stopped(self) -> bool:
        """Whether it is suspended, as after SIGSTOP or Ctrl-Z."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def kill(self) -> None:
        """Kill it, suspended or not, if it still exists."""
        try:
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.gone:
                os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return  # it has ended, or belongs to another user

    def close(self) -> None:
        """Stop watching."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
