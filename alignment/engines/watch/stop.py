"""Why a run ends before its last step, and how its exit status says so."""

from __future__ import annotations

import signal
from enum import IntEnum

from alignment.config.errors import Leaving

PREEMPTED, STOPPED = 85, 130  # exit statuses


class StopReason(IntEnum):
    """What asked a run to stop. Of several that different ranks have seen, all ranks act on the largest.

    SIGINT and the file ``STOP`` are a person's; the others come from a launcher or a scheduler, and a run that they
    ended is meant to be resumed.
    """

    SIGTERM = 1
    SIGHUP = 2
    SIGUSR1 = 3
    STOP = 4
    SIGINT = 5

    @classmethod
    def of_signal(cls, number: int) -> StopReason:
        """The reason that a signal stands for."""
        return cls[signal.Signals(number).name]

    @property
    def by_user(self) -> bool:
        """Whether a person asked for it."""
        return self >= StopReason.STOP

    @property
    def state(self) -> str:
        """The state of the run in ``status.json``: ``preempted`` or ``stopped``."""
        return "stopped" if self.by_user else "preempted"

    @property
    def code(self) -> int:
        """The exit status of every rank."""
        return STOPPED if self.by_user else PREEMPTED


class RunStopped(Leaving):
    """A run was asked to stop and has stopped. A script that does not catch it exits with its code.

    Args:
        reason: what asked for it.
        message: one line for the user: where the run stands, and how to resume it.
        everywhere: every rank raises it, at the same point; else the others have yet to hear of it.
    """

    def __init__(self, reason: StopReason, message: str, *, everywhere: bool = True) -> None:
        super().__init__(reason.code)
        self.reason, self.message, self.everywhere = reason, message, everywhere

    def __str__(self) -> str:
        return self.message


class Cut(Exception):
    """Work that can be done again was given up half-way, on every rank, because the run was asked to stop."""
