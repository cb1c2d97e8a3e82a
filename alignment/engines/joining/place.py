"""Where ranks meet, which one this is, and which network it is in."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from alignment.engines.joining.reach import refusal_of

_MEETINGS = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where ranks meet, and who this one is.

    Attributes:
        address, port: of the store.
        rank, local_rank, world_size: this process.
        agent: torchrun's agent serves the store, and not rank 0.
        attempt: of a launcher that keeps one store over its restarts, and the number of the meeting in this process: a
            store may serve several groups, one after another.
        host: name of this one.
        network: the same for processes that reach each other at loopback addresses.
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
        """The place that a launcher's variables name, for the next meeting of this process."""
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
        """Why a plain connection to the store cannot be made; None if it can."""
        return refusal_of(self.address, self.port)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def _network() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
