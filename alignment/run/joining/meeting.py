"""The ranks meet on the store before they join the process group, and a rank that cannot join tells the others.

Without this, the error of one rank would leave the others waiting for ten minutes, since torch's rendezvous cannot
report it. The others cannot learn of errors before a rank reaches the store, such as a name that does not resolve.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from alignment.config.errors import AlignmentError
from alignment.run.deadlines import bounded, within
from alignment.run.failures import JoinError, ReportedElsewhere, is_lost_peer, reason_of
from alignment.run.joining.place import Place
from alignment.run.joining.port import holder_of
from alignment.run.joining.reach import Listener, refusal_of

Result = TypeVar("Result")
_POLL_S, _REACH_S = 0.1, 0.5
_LAST_S = 10.0  # for the last calls to the store
_HUSH_S = 5.0  # how long ranks wait until all of them know of a problem
_ALL_S = 30.0  # how long a rank that cannot join waits for late ranks, to tell them
_LATER_S = 1.0  # the reporting rank exits first
_ANSWER_S = 60.0  # how long rank 0 may take to respond once its port accepts connections
_STAGE_S = 120.0  # for ranks to check whether they reach each other: up to eight connections of 10 s
_TELL_S = 30.0  # after this time, tell the user what the ranks wait for
_MOST_NAMED = _NEIGHBORS = 8
_SILENT = "the port accepts connections but does not respond"
_DOWN = "the process is suspended, or its host or network is down"


class Meeting:
    """The rendezvous of a run's ranks on their store; on rank 0, this object may serve the store.

    Args:
        place: where the ranks meet.
        seconds: time limit for all ranks to arrive.
        hint: what to do if they do not arrive.
        advice: what to do if hosts do not reach each other.
    """

    def __init__(self, place: Place, seconds: float, hint: str = "", advice: str = "") -> None:
        self.place, self._seconds, self._hint, self._advice = place, seconds, hint, advice
        # Longer than the caller's limit: at its own limit, torch would write pages of C++ frames.
        self._patience = timedelta(seconds=seconds + 60)
        self._refusal: str | None = None
        self._reached: float | None = None
        self._server: Any = None
        self._store: Any = None
        self._listener: Listener | None = None
        self._come, self._told, self._stage = 0, False, "come"
        self._answered = 0.0  # time of the store's last response

    def agree(self, check: Callable[[], None], address: Callable[[], str]) -> None:
        """Wait until all ranks have arrived and found that they can join.

        Args:
            check: raises an AlignmentError if this rank cannot join.
            address: returns the address at which ranks of other hosts can reach those of this one; raises an
                AlignmentError if there is none. Called only if there are other hosts.

        Raises:
            AlignmentError: this rank cannot join, or not all ranks arrived in time.
            ReportedElsewhere: another rank cannot join, and reports it.
        """

        def meet() -> None:
            self._serve()
            self._arrive()
            self._publish_failure(check)
            self._await_all()
            if self._has("several") and not self._has("problem"):
                self._reach_each_other(address)
            self._all("looked")
            self._leave_or_begin()

        try:
            within(self._seconds, meet, every=self._tell)
        except TimeoutError as error:
            raise JoinError(self._too_late(self._seconds)) from error
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise JoinError(
                f"the store at {self.place} was lost while the ranks were joining; see the error of rank 0"
            ) from error

    def fail(self, problem: str) -> None:
        """Report that joining failed on this rank after all ranks had met.

        Args:
            problem: the reason.

        Raises:
            AlignmentError: on the rank that reports it.
            ReportedElsewhere: on the others.
        """
        try:
            within(_LAST_S, lambda: self._publish(problem))
            within(_LAST_S, self._leave_or_begin)
        except (TimeoutError, RuntimeError) as error:  # the store is lost: rank 0 has exited, or its host is cut off
            raise JoinError(problem) from error

    def _serve(self) -> None:
        """Serve the store on rank 0, unless torchrun's agent does; torch later uses the same server."""
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
            what = f"port {place.port} of host {place.host}, the rendezvous port of the ranks (MASTER_PORT),"
            if "EADDRINUSE" not in str(error):
                raise JoinError(f"{what} cannot be opened: {reason_of(error)}") from error
            holder = holder_of(place.port)
            by, advice = f" by {holder}" if holder else "", "end that process, or choose another port (--master_port)"
            raise JoinError(f"{what} is in use{by}; {advice}") from error

    def _arrive(self) -> None:
        """Connect to the store, which may not be available yet."""
        from torch.distributed import PrefixStore, TCPStore

        place = self.place
        # torch retries with growing pauses and does not report the reason; a plain connection is retried more often.
        self._refusal = place.refusal()
        while self._refusal is not None:
            time.sleep(_REACH_S)
            self._refusal = place.refusal()
        self._reached = time.monotonic()
        client = TCPStore(place.address, place.port, is_master=False, wait_for_workers=False, timeout=self._patience)
        self._store = PrefixStore(f"alignment.joining/{place.attempt}", client)
        # An agent's store outlives the workers, which may meet again in the same attempt.
        if not place.agent and (self._has("begun") or self._store.add(f"seat/{place.rank}", 1) > 1):
            raise JoinError(
                f"{place} is used by another run, which already has a rank {place.rank}; choose another MASTER_PORT "
                "(--master_port), or stop the other run"
            )
        if self._store.compare_set("network", "", place.network).decode() != place.network:
            self._store.set("several", "1")
        self._store.set(f"host/{place.rank}", place.host)
        self._store.add("come", 1)

    def _reach_each_other(self, own_address: Callable[[], str]) -> None:
        """Connect one rank of each host to some of the other hosts, in the same way as the backend."""
        listener: Listener | None = None
        if self.place.local_rank == 0:
            listener = self._publish_failure(lambda: Listener(own_address()))
        if listener is not None:
            number = self._store.add("hosts", 1) - 1
            self._store.set(f"at/{number}", json.dumps([self.place.host, *listener.address]))
        self._all("listening")
        if listener is None or self._has("problem"):
            return
        hosts = self._store.add("hosts", 0)
        for step in range(1, min(_NEIGHBORS, hosts - 1) + 1):
            other, address, port = json.loads(self._store.get(f"at/{(number + step) % hosts}"))
            refusal = refusal_of(address, port)
            if refusal is not None:
                who = f"host {self.place.host} cannot reach host {other}"
                self._publish(f"{who} at {address} ({refusal}); {self._advice}")
                break
        self._listener = listener  # kept open until all have checked

    def _publish_failure(self, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except AlignmentError as error:
            self._publish(str(error))
            return None

    def _publish(self, problem: str) -> None:
        if self._store.add("problems", 1) == 1:
            self._store.set("problem", json.dumps([self.place.rank, self.place.host, problem]))

    def _has(self, key: str) -> bool:
        found = bool(self._store.check([key]))
        self._answered = time.monotonic()
        return found

    def _await_all(self) -> None:
        """Wait until all ranks have arrived, or only briefly once one of them cannot join."""
        known: float | None = None
        while self._count("come") < self.place.world_size:
            if known is None and self._has("problem"):
                known = time.monotonic()
            if known is not None and time.monotonic() - known > _ALL_S:
                return
            time.sleep(_POLL_S)

    def _all(self, counter: str) -> None:
        """Wait until all ranks have reached this stage, one of them cannot join, or the stage takes too long."""
        self._store.set(f"{counter}/{self.place.rank}", "1")
        self._store.add(counter, 1)
        self._stage, end = counter, time.monotonic() + _STAGE_S
        while self._count(counter) < self.place.world_size and not self._has("problem"):
            missing = self._missing() if time.monotonic() > end else []
            if missing:
                self._publish(self._stuck(missing, _STAGE_S))
            time.sleep(_POLL_S)

    def _missing(self) -> list[int]:
        """The ranks that have not reached the stage of this one."""
        key = "host" if self._stage == "come" else self._stage
        return [other for other in range(self.place.world_size) if not self._has(f"{key}/{other}")]

    def _count(self, counter: str) -> int:
        count: int = self._store.add(counter, 0)
        self._answered = time.monotonic()
        self._come = count if counter == "come" else self._come
        return count

    def _leave_or_begin(self) -> None:
        """End the meeting: join, or raise if one rank cannot. That rank reports it once all of them know."""
        if not self._has("problem"):
            if self.place.rank == 0:
                self._store.set("begun", "1")
            return
        rank, host, problem = json.loads(self._store.get("problem"))
        self._store.add("seen", 1)
        if self.place.rank in (0, rank):  # the others make no further calls: the store may end with rank 0
            wanted, end = self._count("come"), time.monotonic() + _HUSH_S
            while self._count("seen") < wanted and time.monotonic() < end:
                time.sleep(_POLL_S)
        if rank == self.place.rank:
            raise JoinError(problem)
        time.sleep(_LATER_S)
        raise ReportedElsewhere(f"rank {rank} (host {host}): {problem}")

    def _tell(self, waited: float) -> None:
        """Tell the user, once per host, what a long start is waiting for; raise if waiting is known to be futile."""
        if self._store is None and self._reached is not None and time.monotonic() - self._reached > _ANSWER_S:
            raise JoinError(
                f"{self.place}, where rank 0 should serve the store, accepts connections but does not respond; "
                "choose another MASTER_PORT (--master_port)"
            )
        if self._answered and time.monotonic() - self._answered > _STAGE_S:
            raise JoinError(self._unanswered(_STAGE_S))
        if self._told or waited < _TELL_S or self.place.local_rank != 0:
            return
        self._told = True
        sys.stderr.write(f"rank {self.place.rank} (host {self.place.host}): {self._waits_for()}\n")
        sys.stderr.flush()

    def _waits_for(self) -> str:
        if self._store is None:
            return f"waiting for rank 0 at {self.place} ({self._refusal or _SILENT})"
        return f"waiting at {self.place} for all ranks: {self._come} of {self.place.world_size} have arrived"

    def _too_late(self, seconds: float) -> str:
        place, advice = self.place, self._hint or "start all ranks with the same MASTER_ADDR and MASTER_PORT"
        if self._store is None:
            return (
                f"rank 0 could not be reached at {place} from host {place.host} within {seconds:g} s "
                f"({self._refusal or _SILENT}); {advice}"
            )
        missing = bounded(self._missing, _LAST_S)
        if missing is None:
            return self._unanswered(seconds)
        if self._stage != "come":
            return self._stuck(missing, seconds)
        return (
            f"only {place.world_size - len(missing)} of {place.world_size} ranks arrived at {place} within "
            f"{seconds:g} s; missing: {_named(missing)}; {advice}"
        )

    def _stuck(self, missing: list[int], seconds: float) -> str:
        name = bounded(lambda: self._store.get(f"host/{missing[0]}").decode(), _LAST_S)
        host = f" (host {name})" if name else ""
        return (
            f"all {self.place.world_size} ranks arrived at {self.place}, but rank {_named(missing)}{host} has made no "
            f"progress for {seconds:g} s: {_DOWN}"
        )

    def _unanswered(self, seconds: float) -> str:
        who = "torchrun's agent" if self.place.agent else "rank 0"
        return (
            f"{who}, which serves the store at {self.place}, has not responded to host {self.place.host} for "
            f"{seconds:g} s: {_DOWN}"
        )


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more
