"""Why a run ends before its last step, and the exit status for it."""

from __future__ import annotations

import signal
from enum import IntEnum

from alignment.config.errors import Leaving

PREEMPTED, STOPPED = 85, 130  # exit statuses


class StopReason(IntEnum):
    """What requested the stop. If ranks have seen different reasons, all of them act on the largest.

    A run that a launcher or a scheduler ends, not the user (SIGINT, ``STOP``), is meant to be resumed.
    """

    SIGTERM = 1
    SIGHUP = 2
    SIGUSR1 = 3
    STOP = 4
    SIGINT = 5

    @classmethod
    def of_signal(cls, number: int) -> StopReason:
        """The reason for a signal."""
        return cls[signal.Signals(number).name]

    @property
    def by_user(self) -> bool:
        """Whether the user requested it."""
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
    """A run has stopped on request. A script that does not catch this exits with its code.

    Args:
        reason: what requested the stop.
        message: one line for the user: the state of the run and how to resume it.
        everywhere: whether every rank raises it at the same point; otherwise the others do not know of it yet.
    """

    def __init__(self, reason: StopReason, message: str, *, everywhere: bool = True) -> None:
        super().__init__(reason.code)
        self.reason, self.message, self.everywhere = reason, message, everywhere

    def __str__(self) -> str:
        return self.message


class Cut(Exception):
    """Repeatable work was abandoned on every rank because a stop was requested."""
