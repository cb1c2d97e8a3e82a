"""The network interfaces of this host, and which of them gloo and NCCL use to reach other hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil

from alignment.config.errors import AlignmentError
from alignment.run.joining.names import is_loopback, look_up

_RESOLVE_S = 10.0
Interfaces = Mapping[str, list[str]]


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface that is up, or of all interfaces if their state is unknown."""
    known = psutil.net_if_addrs()
    try:
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    except OSError:  # it reads /proc, which may be missing in a container
        up = set(known)
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [address.address for address in addresses if address.family in families]
        for name, addresses in known.items()
    }
    return {name: addresses for name, addresses in found.items() if addresses and name in up}


def check_named(backend: str, own: Interfaces) -> None:
    """Check that the variable that selects interfaces selects some of this host's.

    Args:
        backend: ``gloo`` or ``nccl``.
        own: interfaces of this host.

    Raises:
        AlignmentError: it selects none, or names one that does not exist.
    """
    text = os.environ.get(variable(backend), "")
    if not text:
        return
    # gloo fails on the first name that is missing; NCCL ignores missing ones.
    missing = [name for name in text.split(",") if name not in own] if backend == "gloo" else []
    if missing or not chosen(backend, own):
        what = f"{variable(backend)}={text}, but host {socket.gethostname()}"
        raise AlignmentError(
            f"{what} has no interface {missing[0] if missing else text} that is up; it has {listed(own)}"
        )


def address_for_others(backend: str, own: Interfaces) -> str:
    """The address at which ranks of other hosts can reach the ranks of this one.

    Args:
        backend: ``gloo`` or ``nccl``.
        own: interfaces of this host.

    Raises:
        AlignmentError: the address is reachable from this host only.
    """
    name, host = variable(backend), socket.gethostname()
    others = {each: found for each, found in own.items() if not all(map(is_loopback, found))}
    advice = f"set {name} to the interface that connects to the other hosts; host {host} has {listed(others)}"
    if not others:
        raise AlignmentError(
            f"host {host} has no network interface that connects to other hosts; it has {listed(own)}"
        )
    if backend == "nccl" or os.environ.get(name):
        taken = chosen(backend, own)
        found = [address for each in taken if each in others for address in others[each] if not is_loopback(address)]
        if found:
            return min(found, key=lambda address: address.startswith("fe80"))  # link-local last
        by = f"{name}={os.environ[name]}" if os.environ.get(name) else "NCCL"
        raise AlignmentError(
            f"{by} selects {', '.join(taken)}, which other hosts cannot reach on host {host}; {advice}"
        )
    try:
        address = gloo_address(host)
    except OSError as error:
        raise AlignmentError(
            f"the host name {host} cannot be resolved ({error}), so gloo would use 127.0.0.1; {advice}"
        ) from error
    if is_loopback(address):
        raise AlignmentError(
            f"the host name {host} resolves to {address}, a loopback address that other hosts cannot reach; {advice}"
        )
    return address


def gloo_address(host: str) -> str:
    """The address that gloo uses without GLOO_SOCKET_IFNAME: the first one of the host name that belongs to this host.

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
    raise OSError("to an address of this host")


def chosen(backend: str, own: Interfaces) -> list[str]:
    """The interfaces of this host that a backend uses; for gloo only those named in GLOO_SOCKET_IFNAME.

    NCCL_SOCKET_IFNAME lists prefixes of interface names, exact names after ``=``, or exclusions after ``^``. If it is
    unset, InfiniBand interfaces come first, then all but loopback and those of containers and virtual machines, which
    NCCL uses only if there is nothing else.
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
    """Interfaces and their addresses, for a message; link-local IPv6 addresses only if there are no others."""
    shown = {
        name: [address for address in addresses if not address.startswith("fe80")] or addresses
        for name, addresses in own.items()
    }
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in shown.items()) or "none"


def variable(backend: str) -> str:
    """The environment variable that selects a backend's interfaces."""
    return f"{backend.upper()}_SOCKET_IFNAME"
