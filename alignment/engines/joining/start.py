"""Joining the process group: what is checked before, how long it may take, what is said where it fails."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from alignment.engines.failures import JoinError, is_lost_peer, reason_of
from alignment.engines.joining.interfaces import address_for_others, check_named, interfaces, variable
from alignment.engines.joining.meeting import Meeting
from alignment.engines.joining.names import is_loopback, is_own_name, look_up
from alignment.engines.joining.place import Place
from alignment.internals.deepspeed_groups import set_timeout_of_new_groups
from alignment.internals.torch import set_group_timeout

_RESOLVE_S = 10.0
_MEETING_S = 600.0  # how long ranks wait for the last one to start
_JOINING_S = 60.0  # how long they take to connect to each other once all have; gloo waits five times as long
_WORKING = timedelta(hours=6)
_LOOPBACK_S = 90.0  # how long ranks wait for others where they can only come from this host


def join(backend: str) -> None:
    """Join the process group, through DeepSpeed. All ranks have met before, so that it takes seconds or fails.

    Afterwards ranks wait for each other for hours: one tokenises, or writes a large model, while the others wait. A
    rank that is gone is noticed by the guard or the launcher, not by this limit. It is the limit of the groups that
    DeepSpeed makes as well. DEEPSPEED_TIMEOUT, in minutes, takes the place of all of these limits if set.

    Args:
        backend: ``gloo`` or ``nccl``.

    Raises:
        AlignmentError: as :func:`meet`, or the ranks cannot connect to each other.
    """
    import deepspeed
    import torch

    own_limit = os.environ.get("DEEPSPEED_TIMEOUT")
    limit = 60.0 * float(own_limit) if own_limit else None
    meeting: Meeting | None = None
    if not torch.distributed.is_initialized():
        if os.environ["WORLD_SIZE"] != "1":
            meeting = meet(backend, limit or _MEETING_S)
        else:
            _addresses(os.environ["MASTER_ADDR"])  # torch would look it up for 10 minutes
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=limit or _JOINING_S), verbose=False)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        if meeting is None:
            raise JoinError(f"the process group could not be started ({reason_of(error)})") from error
        meeting.fail(
            f"host {socket.gethostname()} could not connect to another rank ({reason_of(error)}): {_advice(backend)}"
        )
    if limit is None:
        set_group_timeout(_WORKING)
    set_timeout_of_new_groups(_WORKING if limit is None else timedelta(seconds=limit))


def meet(backend: str, seconds: float) -> Meeting:
    """Meet the other ranks; afterwards nothing that can be known before keeps them from joining.

    Args:
        backend: ``gloo`` or ``nccl``.
        seconds: that all ranks may take to come.

    Returns:
        The meeting, to be kept until the group has been joined: on rank 0 it may be what serves the store.

    Raises:
        AlignmentError: MASTER_ADDR does not resolve, the port is in use, the other ranks do not come, or would not
            reach this one.
        ReportedElsewhere: another rank cannot join.
    """
    place = Place.of_environment()
    several = int(os.environ["LOCAL_WORLD_SIZE"]) < place.world_size
    addresses = _addresses(place.address)
    hint = ""
    if several and all(map(is_loopback, addresses)) and not is_own_name(place.address):
        seconds = min(seconds, _LOOPBACK_S)
        hint = f"{place.address} is each host itself; set MASTER_ADDR to the name of rank 0's host (--master_addr)"
    own = interfaces()
    meeting = Meeting(place, seconds, hint, _advice(backend))
    meeting.agree(lambda: check_named(backend, own), lambda: address_for_others(backend, own))
    return meeting


def _addresses(name: str) -> list[str]:
    """Of rank 0's host."""
    try:
        return look_up(name, _RESOLVE_S)
    except OSError as error:
        raise JoinError(
            f"MASTER_ADDR={name} cannot be resolved on host {socket.gethostname()} ({error}): set it to the name or "
            "address of rank 0's host (--master_addr)"
        ) from error


def _advice(backend: str) -> str:
    name = variable(backend)
    return f"set {name} to the interface that connects the hosts, and see that no firewall is between them"
