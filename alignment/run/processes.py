"""Processes of this machine: whether they run, are stopped or have ended. They need not be children of this one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc/self/stat").exists()


class Process(NamedTuple):
    """A process; its start time identifies it as well, because process IDs are reused."""

    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this ID now."""
        return cls(pid, _state_and_start(pid)[1])

    @property
    def state(self) -> str:
        """``running``, ``stopped`` (as after SIGSTOP or Ctrl-Z) or ``gone``."""
        letter, start = _state_and_start(self.pid)
        if start != self.start or letter in "ZX":  # dead, but not yet reaped by its parent
            return "gone"
        return "stopped" if letter in "Tt" else "running"


def _state_and_start(pid: int) -> tuple[str, str]:
    """The kernel's letter for the state, and the start time; ``X`` if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace") if _PROC else ""
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if fields else ("R", "")


def machine() -> str:
    """A name that is equal for processes that see each other: host, boot of its kernel, and PID namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)
