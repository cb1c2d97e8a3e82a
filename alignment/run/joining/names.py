"""Host name lookups with a time limit."""

from __future__ import annotations

import ipaddress
import socket
import time

from alignment.run.deadlines import within

_PAUSE_S = 1.0  # the name of a host that has just started may appear a moment later


def look_up(name: str, seconds: float) -> list[str]:
    """The addresses of a host name, in the resolver's order; unknown names are looked up again.

    Args:
        name: a host name or an address.
        seconds: time limit.

    Raises:
        OSError: the name does not resolve (with the resolver's reason), or the resolver did not respond in time.
    """
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            found = within(left, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except TimeoutError as error:
            raise OSError(f"the resolver did not respond within {seconds:g} s") from error
        except UnicodeError as error:  # an empty label, or one that is too long
            raise OSError("not a valid host name") from error
        except socket.gaierror as error:
            if time.monotonic() + _PAUSE_S >= end:
                raise OSError(error.strerror or str(error)) from error
            time.sleep(_PAUSE_S)


def is_loopback(address: str) -> bool:
    """Whether an address is reachable only from the same host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own_name(name: str) -> bool:
    """Whether a name is this host's, with or without its domain."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]
