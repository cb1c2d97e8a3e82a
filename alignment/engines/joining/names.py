"""Names of hosts, looked up within a bounded time."""

from __future__ import annotations

import ipaddress
import socket
import time

from alignment.engines.deadlines import within

_PAUSE_S = 1.0  # a host of a cluster that has just started may get its name a moment later


def look_up(name: str, seconds: float) -> list[str]:
    """The addresses that a name stands for, in the resolver's order; one that is unknown is looked up again.

    Args:
        name: a host's name, or an address.
        seconds: that it may take.

    Raises:
        OSError: it stands for none, with the resolver's reason, or the resolver did not answer in time.
    """
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            found = within(left, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except TimeoutError as error:
            raise OSError(f"the resolver gave no answer within {seconds:g} s") from error
        except UnicodeError as error:  # an empty label, or one that is too long
            raise OSError("it is no name of a host") from error
        except socket.gaierror as error:
            if time.monotonic() + _PAUSE_S >= end:
                raise OSError(error.strerror or str(error)) from error
            time.sleep(_PAUSE_S)


def is_loopback(address: str) -> bool:
    """Whether only processes of the same host reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own_name(name: str) -> bool:
    """Whether a name is that of this host, with or without its domain."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]
