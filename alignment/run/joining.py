"""Joining the process group: the ranks meet at one store within a time limit, or each of them ends with an error."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from concurrent import futures
from datetime import timedelta
from typing import Any

from alignment.config.errors import AlignmentError
from alignment.internals.deepspeed import set_timeout_of_new_groups
from alignment.internals.torch import set_group_timeout
from alignment.run.ending import bounded, reason_of, within
from alignment.run.ranks import local_rank, rank, take_from_group, world_size

_ARRIVE_S = 600.0  # how long ranks wait for the last one to start
_CONNECT_S = 60.0  # for ranks to connect to each other once all have started
_WORK_S = 6 * 3600.0
_RESOLVE_S, _TELL_S, _ANSWER_S, _POLL_S = 10.0, 30.0, 10.0, 0.2
_CAUSES = (
    "usual causes: a rank that failed or was not started, another MASTER_ADDR or MASTER_PORT, a firewall between the "
    "hosts, or the wrong network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)
_MEETINGS = itertools.count()  # a store may serve several groups of the same processes, one after another


def join(backend: str) -> None:
    """Join the process group (gloo or nccl), unless it is initialized already, and let DeepSpeed use it.

    Afterwards, ranks may wait for each other for hours. DEEPSPEED_TIMEOUT, in minutes, overrides all limits if set.

    Raises:
        AlignmentError: the ranks cannot meet in time, or the process group differs from the environment.
    """
    import deepspeed
    import torch.distributed as dist

    limit = 60 * float(os.environ.get("DEEPSPEED_TIMEOUT", "0"))
    if not dist.is_initialized() and os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # needs no address
    elif not dist.is_initialized():
        _meet(_connect(limit or _ARRIVE_S), backend, limit)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    take_from_group()
    for set_limit in (set_group_timeout, set_timeout_of_new_groups):
        set_limit(timedelta(seconds=limit or _WORK_S))


def _connect(seconds: float) -> Any:
    """Connect to the store, which rank 0 serves unless torchrun's agent does, as soon as it is available."""
    from torch.distributed import DistError, PrefixStore, TCPStore

    name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves, begun = rank() == 0 and not agent, time.monotonic()
    while True:
        try:
            socket.getaddrinfo(name, port)
            if not serves:  # torch's own attempts become rarer and do not tell the reason
                socket.create_connection((name, port), timeout=_ANSWER_S).close()
            break
        except (OSError, UnicodeError) as error:
            # The name of a host that has just started may appear a moment later.
            limit = _RESOLVE_S if isinstance(error, (socket.gaierror, UnicodeError)) else seconds
            if time.monotonic() - begun > limit:
                what = f"cannot reach rank 0 at MASTER_ADDR={name}, MASTER_PORT={port}"
                raise AlignmentError(f"host {socket.gethostname()} {what} ({error}); {_CAUSES}") from error
        time.sleep(_POLL_S)
    try:
        store = TCPStore(name, port, None, serves, timedelta(seconds=_CONNECT_S), False, serves)
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_MEETINGS)}"
        meeting = PrefixStore(f"alignment.joining/{world_size()}/{attempt}", store)
        # An agent's store outlives the workers, which may meet again in the same attempt.
        if meeting.add(f"rank/{rank()}", 1) > 1 and not agent:
            raise DistError(f"another run has a rank {rank()} there")
    except DistError as error:
        what = f"MASTER_PORT={port} of host {name} cannot be used ({reason_of(error)})"
        raise AlignmentError(f"{what}; choose another --master_port, or end the program that uses it") from error
    return meeting


def _meet(store: Any, backend: str, limit: float) -> None:
    """Wait until all ranks have arrived, and create the process group."""
    import torch

    size, timeout = world_size(), timedelta(seconds=limit or _CONNECT_S)
    device = torch.device("cuda", local_rank()) if backend == "nccl" else None

    def arrive() -> None:
        arrived, told = store.add("arrived", 1), time.monotonic()
        while arrived < size:
            if rank() == 0 and time.monotonic() - told > _TELL_S:
                print(f"rank 0: {arrived} of {size} ranks have arrived", file=sys.stderr, flush=True)
                told = time.monotonic()
            time.sleep(_POLL_S)
            arrived = store.add("arrived", 0)

    def connect() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        torch.distributed.init_process_group(
            backend, store=store, rank=rank(), world_size=size, timeout=timeout, device_id=device
        )

    try:
        within(limit or _ARRIVE_S, arrive)
        within(limit or _CONNECT_S, connect)  # gloo takes several times its own limit
    except (futures.TimeoutError, RuntimeError) as error:
        missing = bounded(lambda: [str(each) for each in range(size) if not store.check([f"rank/{each}"])], _ANSWER_S)
        what = f"{len(missing or ())} of {size} ranks have not arrived: {', '.join(missing or ())}"
        what = what if missing else f"host {socket.gethostname()} could not connect to the other ranks"
        raise AlignmentError(f"{what} ({reason_of(error) or 'no response in time'}); {_CAUSES}") from error
