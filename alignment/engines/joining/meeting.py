"""The ranks meet on the store before they join the process group, and a rank that cannot join tells the others.

Without it one rank's error leaves the others waiting for ten minutes: torch's own meeting has no word for it. What
happens before a rank reaches the store, such as a name that does not resolve, the others cannot know.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from alignment.config.errors import AlignmentError
from alignment.engines.failures import ReportedElsewhere, is_lost_peer, reason_of
from alignment.engines.joining.deadlines import within
from alignment.engines.joining.port import holder_of

_POLL_S = 0.1
_LAST_S = 10.0  # for a last word
_HUSH_S = 5.0  # how long ranks wait for all of them to know of a problem
_ALL_S = 30.0  # how long a rank that cannot join keeps the news for those that have not come yet
_LATER_S = 1.0  # the rank that speaks ends first
_TELL_S = 30.0  # after so long the user hears what is waited for
_MOST_NAMED = 8
_meetings = 0  # of this process: a store may serve several groups, one after another


@dataclass(frozen=True)
class Place:
    """Where ranks meet, and who this one is.

    Attributes:
        address, port: of the store.
        rank, local_rank, world_size: this process.
        agent: torchrun's agent serves the store, and not rank 0.
        attempt: of a launcher that keeps one store over its restarts.
    """

    address: str
    port: int
    rank: int
    local_rank: int
    world_size: int
    agent: bool
    attempt: str

    @classmethod
    def of_environment(cls) -> Place:
        """The place that a launcher's variables name."""
        return cls(
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class Meeting:
    """The ranks of a run on their store; on rank 0 this object may be what serves it.

    Args:
        place: where.
        seconds: that all of them may take to come.
        hint: what to do if they do not.
    """

    def __init__(self, place: Place, seconds: float, hint: str = "") -> None:
        global _meetings
        _meetings += 1
        self.place, self._seconds, self._hint = place, seconds, hint
        # The caller gives up first: at its own end torch would write pages of C++ frames.
        self._patience = timedelta(seconds=seconds + 60)
        self._server: Any = None
        self._store: Any = None
        self._come, self._told, self._key = 0, False, f"alignment.joining/{place.attempt}/{_meetings}"

    def agree(self, problem: str | None, problem_with_hosts: Callable[[], str | None]) -> None:
        """Wait until all ranks have come and found nothing that keeps them from joining.

        Args:
            problem: why this rank cannot join; None if it can.
            problem_with_hosts: says why it cannot if there are other hosts. Called only if there are.

        Raises:
            AlignmentError: it cannot join, or not all ranks came in time.
            ReportedElsewhere: another rank cannot join, and says so.
        """

        def meet() -> None:
            self._serve()
            self._arrive()
            if problem is not None:
                self._publish(problem)
            self._await_all()
            if not self._has("problem") and self._has("several"):
                found = problem_with_hosts()
                if found is not None:
                    self._publish(found)
            self._store.add("looked", 1)
            while self._count("looked") < self.place.world_size and not self._has("problem"):
                time.sleep(_POLL_S)
            self._leave_or_begin()

        try:
            within(self._seconds, meet, every=self._tell)
        except TimeoutError as error:
            raise AlignmentError(self._too_late()) from error
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise AlignmentError(
                f"the ranks were meeting at {self.place} when what serves them there ended: see what rank 0 says"
            ) from error

    def fail(self, problem: str) -> None:
        """All ranks have met, and joining has failed on this one.

        Args:
            problem: why.

        Raises:
            AlignmentError: on the rank that says so.
            ReportedElsewhere: on the others.
        """
        try:
            within(_LAST_S, lambda: self._publish(problem))
            within(_LAST_S, self._leave_or_begin)
        except (TimeoutError, RuntimeError) as error:  # the store has gone: rank 0 has ended, or its host is cut off
            raise AlignmentError(problem) from error

    def _serve(self) -> None:
        """On rank 0, begin to serve the store, unless torchrun's agent does; torch takes the same server later on."""
        place = self.place
        if place.rank != 0 or place.agent:
            return
        from torch.distributed import DistNetworkError, TCPStore

        try:
            self._server = TCPStore(
                place.address,
                place.port,
                world_size=place.world_size,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=self._patience,
            )
        except DistNetworkError as error:
            what = f"port {place.port} of host {socket.gethostname()}, where rank 0 lets the ranks meet (MASTER_PORT),"
            if "EADDRINUSE" not in str(error):
                raise AlignmentError(f"{what} cannot be served: {reason_of(error)}") from error
            holder = holder_of(place.port)
            by, advice = f" by {holder}" if holder else "", "end that process, or choose another port (--master_port)"
            raise AlignmentError(f"{what} is in use{by}: {advice}") from error

    def _arrive(self) -> None:
        """Come to the store; it may not be served yet."""
        from torch.distributed import PrefixStore, TCPStore

        place = self.place
        client = TCPStore(
            place.address,
            place.port,
            is_master=False,
            wait_for_workers=False,
            timeout=self._patience,
        )
        self._store = PrefixStore(self._key, client)
        # An agent's store outlives the workers, which may come again to the same attempt.
        if not place.agent and (self._has("begun") or self._store.add(f"seat/{place.rank}", 1) > 1):
            raise AlignmentError(
                f"{place} belongs to a run that has a rank {place.rank} already: choose another MASTER_PORT "
                "(--master_port), or end the other run"
            )
        network = _network()
        if self._store.compare_set("network", "", network).decode() != network:
            self._store.set("several", "1")
        self._store.set(f"host/{place.rank}", socket.gethostname())
        self._store.add("come", 1)

    def _publish(self, problem: str) -> None:
        if self._store.add("problems", 1) == 1:
            self._store.set("problem", json.dumps([self.place.rank, socket.gethostname(), problem]))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _await_all(self) -> None:
        """Wait until all ranks have come; once one of them cannot join, not for long."""
        known: float | None = None
        while self._count("come") < self.place.world_size:
            if known is None and self._has("problem"):
                known = time.monotonic()
            if known is not None and time.monotonic() - known > _ALL_S:
                return
            time.sleep(_POLL_S)

    def _count(self, counter: str) -> int:
        count: int = self._store.add(counter, 0)
        self._come = count if counter == "come" else self._come
        return count

    def _leave_or_begin(self) -> None:
        """Part: to join, or because one rank cannot. That rank speaks, once all of them know."""
        if not self._has("problem"):
            if self.place.rank == 0:
                self._store.set("begun", "1")
            return
        rank, host, problem = json.loads(self._store.get("problem"))
        self._store.add("seen", 1)
        wanted, end = self._count("come"), time.monotonic() + _HUSH_S
        while self._count("seen") < wanted and time.monotonic() < end:
            time.sleep(_POLL_S)
        if rank == self.place.rank:
            raise AlignmentError(problem)
        time.sleep(_LATER_S)
        raise ReportedElsewhere(f"rank {rank} (host {host}): {problem}")

    def _tell(self, waited: float) -> None:
        """Tell the user, once per host, what a long start waits for."""
        if self._told or waited < _TELL_S or self.place.local_rank != 0:
            return
        self._told = True
        sys.stderr.write(f"rank {self.place.rank} (host {socket.gethostname()}): {self._waits_for()}\n")
        sys.stderr.flush()

    def _waits_for(self) -> str:
        if self._store is None:
            return f"waiting for rank 0 at {self.place} ({_answer(self.place)})"
        return f"waiting at {self.place} for all ranks: {self._come} of {self.place.world_size} have come"

    def _too_late(self) -> str:
        place, advice = self.place, "start all ranks, with the same MASTER_ADDR and MASTER_PORT"
        if self._store is None:
            return (
                f"rank 0 could not be reached at {place} from host {socket.gethostname()} within {self._seconds:g} s "
                f"({_answer(place)}): {self._hint or advice}"
            )
        try:
            came = within(_LAST_S, lambda: [r for r in range(place.world_size) if self._has(f"host/{r}")])
        except (TimeoutError, RuntimeError):
            came = []
        missing = [str(other) for other in range(place.world_size) if other not in came]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return (
            f"of {place.world_size} ranks only {len(came)} came to {place} within {self._seconds:g} s, without "
            f"{', '.join(missing[:_MOST_NAMED])}{more}: {self._hint or advice}"
        )


def _answer(place: Place) -> str:
    """What becomes of a plain connection to the place."""
    try:
        socket.create_connection((place.address, place.port), timeout=3).close()
    except OSError as error:
        return error.strerror or str(error)
    return "something answers there, but it is no rank 0"


def _network() -> str:
    """The same for processes that reach each other at loopback addresses."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
