"""Check that hosts reach each other at the addresses that the backend uses; firewalls or wrong networks may block it.

gloo itself waits five times its limit for a connection that cannot be made, and floods the terminal meanwhile.
"""

from __future__ import annotations

import socket

from alignment.config.errors import AlignmentError

_CONNECT_S = 10.0


class Listener:
    """A port of this host that others try to connect to; the kernel accepts the connections.

    Args:
        address: address of this host.

    Attributes:
        address: the address and the port.

    Raises:
        AlignmentError: the address does not belong to this host.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.bind((address, 0))
        except OSError as error:
            raise AlignmentError(
                f"host {socket.gethostname()} cannot listen on {address}: {error.strerror}"
            ) from error
        self._socket.listen(64)
        self.address: tuple[str, int] = (address, self._socket.getsockname()[1])


def refusal_of(address: str, port: int) -> str | None:
    """Why a connection to an address fails; None if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
