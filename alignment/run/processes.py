"""Immediate notification of the end of processes that are not children of this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_HIDDEN = ""  # start time of a process that exists but is hidden


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


def machine() -> str:
    """A name shared by the processes that can see each other: those of one host, boot and PID namespace."""
    return f"{socket.gethostname()}/{_boot()}/{_space()}"


def process_start(pid: int) -> str | None:
    """The start time of a process, for comparison only; None if there is no such process, "" if it is hidden.

    The kernel counts from boot. The time of day, which psutil derives from that, changes when the clock is set.
    """
    try:
        shown = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return _hidden_start(pid) if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    after_name = shown.rpartition(")")[2].split()
    state, start = after_name[0], after_name[19]
    return None if state in "ZX" else start  # dead, but not yet reaped by its parent


def _hidden_start(pid: int) -> str | None:
    """The start time of a process that /proc does not show: it may be mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return None if isinstance(error, ProcessLookupError) else _HIDDEN
    return _HIDDEN


def _start_without_proc(pid: int) -> str | None:
    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return _HIDDEN


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
