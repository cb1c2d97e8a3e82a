"""The process that listens on a port of this host."""

from __future__ import annotations

import psutil

_LONGEST = 80


def holder_of(port: int) -> str | None:
    """The process that listens on a port, for a message; None if unknown, as for another user's process."""
    try:
        found = [
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None
        ]
        if not found:
            return None
        command = " ".join(psutil.Process(found[0]).cmdline())
    except psutil.Error:
        return None
    return f"process {found[0]} ({command if len(command) <= _LONGEST else command[: _LONGEST - 1] + '…'})"
