"""The network interfaces of this host, and which of them gloo and NCCL take to talk to other hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil

from alignment.config.errors import AlignmentError
from alignment.engines.joining.names import is_loopback, look_up

_RESOLVE_S = 10.0
Interfaces = Mapping[str, list[str]]


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface that is up, or of all where that cannot be known."""
    known = psutil.net_if_addrs()
    try:
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    except OSError:  # it reads /proc, which a container may lack
        up = set(known)
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [address.address for address in addresses if address.family in families]
        for name, addresses in known.items()
    }
    return {name: addresses for name, addresses in found.items() if addresses and name in up}


def check_named(backend: str, own: Interfaces) -> None:
    """The variable that names interfaces has to name some of this host's.

    Args:
        backend: ``gloo`` or ``nccl``.
        own: of this host.

    Raises:
        AlignmentError: it does not.
    """
    text = os.environ.get(variable(backend), "")
    if not text:
        return
    # gloo looks each name up and fails on the first that is missing; NCCL takes what it finds.
    missing = [name for name in text.split(",") if name not in own] if backend == "gloo" else []
    if missing or not chosen(backend, own):
        what = f"{variable(backend)}={text}, but host {socket.gethostname()}"
        raise AlignmentError(
            f"{what} has no interface {missing[0] if missing else text} that is up; it has {listed(own)}"
        )


def address_for_others(backend: str, own: Interfaces) -> str:
    """The address at which ranks of other hosts are to reach those of this one.

    Args:
        backend: ``gloo`` or ``nccl``.
        own: of this host.

    Raises:
        AlignmentError: it is one that only this host reaches.
    """
    name, host = variable(backend), socket.gethostname()
    others = {each: found for each, found in own.items() if not all(map(is_loopback, found))}
    advice = f"set {name} to the interface that leads to the other hosts; host {host} has {listed(others)}"
    if not others:
        raise AlignmentError(
            f"host {host} has no network interface that leads to the other hosts: it has {listed(own)}"
        )
    if backend == "nccl" or os.environ.get(name):
        taken = chosen(backend, own)
        found = [address for each in taken if each in others for address in others[each] if not is_loopback(address)]
        if found:
            return min(found, key=lambda address: address.startswith("fe80"))  # of the link alone
        by = f"{name}={os.environ[name]}" if os.environ.get(name) else "NCCL"
        raise AlignmentError(f"{by} takes {', '.join(taken)}, by which other hosts cannot reach host {host}: {advice}")
    try:
        address = gloo_address(host)
    except OSError as error:
        raise AlignmentError(
            f"the name of this host, {host}, cannot be resolved ({error}), so that gloo would take 127.0.0.1: {advice}"
        ) from error
    if is_loopback(address):
        raise AlignmentError(
            f"host {host} would tell the others to reach it at {address}, which its name resolves to and which is "
            f"each host itself: {advice}"
        )
    return address


def gloo_address(host: str) -> str:
    """The address that gloo takes without GLOO_SOCKET_IFNAME: the first one of the host's name that is its own.

    Args:
        host: name of this host.

    Raises:
        OSError: there is none.
    """
    for address in look_up(host, _RESOLVE_S):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return address
    raise OSError("to an address of its own")


def chosen(backend: str, own: Interfaces) -> list[str]:
    """The interfaces that a backend takes, of those of this host; for gloo by GLOO_SOCKET_IFNAME alone.

    NCCL takes interfaces whose names begin as NCCL_SOCKET_IFNAME says, are equal to it after ``=``, or are none of
    those after ``^``. Without it InfiniBand's come first, then all but loopback and those of containers and virtual
    machines, and these only where there is no other.
    """
    text = os.environ.get(variable(backend), "")
    if backend == "gloo":
        return [name for name in text.split(",") if name in own]
    if not text:
        fast = [name for name in own if name.startswith("ib")]
        physical = [name for name in own if not name.startswith(("lo", "docker", "virbr"))]
        return fast or physical or [name for name in own if name.startswith("docker")] or list(own)
    inverted = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    wanted = text.removeprefix("=").split(",")
    return [
        name
        for name in own
        if inverted != any(name == each if exact else name.startswith(each) for each in wanted if each)
    ]


def listed(own: Interfaces) -> str:
    """Interfaces and their addresses, for a message; without IPv6 addresses of the link where there are others."""
    shown = {
        name: [address for address in addresses if not address.startswith("fe80")] or addresses
        for name, addresses in own.items()
    }
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in shown.items()) or "none"


def variable(backend: str) -> str:
    """The environment variable that names a backend's interfaces."""
    return f"{backend.upper()}_SOCKET_IFNAME"
