"""The processes of other ranks on this machine, whose end is noticed at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignment.engines.watch.processes import Watched


class Neighbours:
    """Other ranks whose processes this one can see. One thread begins the watch, others ask."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}

    def begin(self, processes: Mapping[int, int]) -> None:
        """Watch the processes of these ranks."""
        # At once: another thread may be going through those that there are.
        self._watched = {rank: Watched.begin(pid) for rank, pid in processes.items()}

    def __contains__(self, rank: int) -> bool:
        return rank in self._watched

    def __iter__(self) -> Iterator[int]:
        return iter(self._watched)

    @property
    def gone(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, watched in self._watched.items() if watched.ended]

    def kill(self, rank: int) -> None:
        """End a rank's process, stopped or not; nothing where it is no neighbour."""
        if rank in self._watched:
            self._watched[rank].kill()

    def close(self) -> None:
        """End the watch."""
        before, self._watched = self._watched, {}
        for watched in before.values():
            watched.close()
