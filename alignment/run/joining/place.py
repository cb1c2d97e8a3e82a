"""Where the ranks meet, which rank this process is, and which network it is in."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from alignment.run.joining.reach import refusal_of

_MEETINGS = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where the ranks meet, and which rank this process is.

    Attributes:
        address, port: address of the store.
        rank, local_rank, world_size: numbers of this process.
        agent: whether torchrun's agent serves the store instead of rank 0.
        attempt: restart count of a launcher that keeps one store across restarts, and the number of the meeting in
            this process: a store may serve several groups, one after another.
        host: name of this host.
        network: equal for processes that reach each other at loopback addresses.
    """

    address: str
    port: int
    rank: int
    local_rank: int
    world_size: int
    agent: bool
    attempt: str
    host: str
    network: str

    @classmethod
    def of_environment(cls) -> Place:
        """Read a launcher's variables, for the next meeting of this process."""
        return cls(
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_MEETINGS)}",
            host=socket.gethostname(),
            network=_network(),
        )

    def refusal(self) -> str | None:
        """Why a plain connection to the store fails; None if it succeeds."""
        return refusal_of(self.address, self.port)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def _network() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
