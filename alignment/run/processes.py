"""Processes of this machine: whether they run, are stopped or have ended, and which of them are launchers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

# Programs that start ranks and monitor them, also as a script or module of an interpreter. Shells do not count: a
# `nohup … &` run outlives its shell. SLURM appends the step ID.
_LAUNCHER = re.compile(
    r"(\S*python\S* (-(?!c )\S+ )*)?(\S*/)?(?P<name>torchrun|deepspeed(\.pt)?|ds|accelerate(-launch)?|slurmstepd|"
    r"torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.(launch|runner))(:\S*)?( |$)"
)


class Process(NamedTuple):
    """A process, which need not be a child; its start time identifies it as well."""

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
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]


def machine() -> str:
    """A name that is equal for processes that see each other: host, boot of its kernel, and PID namespace."""
    host = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{host}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{host}/{os.getpid()}"  # equal for no other process, so none is looked up


def launchers() -> dict[Process, str]:
    """The launchers among the ancestors of this process and their names, nearest first."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                if name := launcher_name(ancestor.cmdline()):
                    found[Process.of(ancestor.pid)] = name
    return found


def launcher_name(command: list[str]) -> str:
    """The name of a launcher, from its command line; empty for any other process."""
    found = _LAUNCHER.match(" ".join(command))
    return found["name"] if found else ""
