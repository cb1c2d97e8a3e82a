"""Joining the process group: checks in advance, time limits, and error messages."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from alignment.internals.deepspeed_groups import set_timeout_of_new_groups
from alignment.internals.torch import set_group_timeout
from alignment.run.failures import JoinError, is_lost_peer, reason_of
from alignment.run.joining.interfaces import address_for_others, check_named, interfaces, variable
from alignment.run.joining.meeting import Meeting
from alignment.run.joining.names import is_loopback, is_own_name, look_up
from alignment.run.joining.place import Place

_RESOLVE_S = 10.0
_MEETING_S = 600.0  # how long ranks wait for the last one to start
_JOINING_S = 60.0  # for ranks to connect to each other once all have started; gloo waits five times as long
_WORKING = timedelta(hours=6)
_LOOPBACK_S = 90.0  # how long ranks wait if all of them must be on this host


def join(backend: str) -> None:
    """Join the process group through DeepSpeed. All ranks have met before, so this takes seconds or fails.

    Afterwards, ranks may wait for each other for hours, for example while one tokenizes or writes a large model. Lost
    ranks are detected by the guard or the launcher, not by this limit, which also applies to the groups that DeepSpeed
    creates. DEEPSPEED_TIMEOUT, in minutes, overrides all of these limits if set.

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
            _addresses(os.environ["MASTER_ADDR"])  # torch would retry the lookup for 10 minutes
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=limit or _JOINING_S), verbose=False)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        if meeting is None:
            raise JoinError(f"the process group could not be started ({reason_of(error)})") from error
        meeting.fail(
            f"host {socket.gethostname()} could not connect to another rank ({reason_of(error)}); {_advice(backend)}"
        )
    if limit is None:
        set_group_timeout(_WORKING)
    set_timeout_of_new_groups(_WORKING if limit is None else timedelta(seconds=limit))


def meet(backend: str, seconds: float) -> Meeting:
    """Meet the other ranks and run all checks that are possible before joining.

    Args:
        backend: ``gloo`` or ``nccl``.
        seconds: time limit for all ranks to arrive.

    Returns:
        The meeting. Keep it until the group has been joined: on rank 0 it may serve the store.

    Raises:
        AlignmentError: MASTER_ADDR does not resolve, the port is in use, or the other ranks do not arrive or cannot
            reach this one.
        ReportedElsewhere: another rank cannot join.
    """
    place = Place.of_environment()
    several = int(os.environ["LOCAL_WORLD_SIZE"]) < place.world_size
    addresses = _addresses(place.address)
    hint = ""
    if several and all(map(is_loopback, addresses)) and not is_own_name(place.address):
        seconds = min(seconds, _LOOPBACK_S)
        hint = f"{place.address} is a loopback address; set MASTER_ADDR to the name of rank 0's host (--master_addr)"
    own = interfaces()
    meeting = Meeting(place, seconds, hint, _advice(backend))
    meeting.agree(lambda: check_named(backend, own), lambda: address_for_others(backend, own))
    return meeting


def _addresses(name: str) -> list[str]:
    """Resolve rank 0's host."""
    try:
        return look_up(name, _RESOLVE_S)
    except OSError as error:
        raise JoinError(
            f"MASTER_ADDR={name} cannot be resolved on host {socket.gethostname()} ({error}); set it to the name or "
            "address of rank 0's host (--master_addr)"
        ) from error


def _advice(backend: str) -> str:
    name = variable(backend)
    return f"set {name} to the interface that connects the hosts, and check that no firewall blocks them"
