"""The processes of other ranks on this machine, whose end is noticed immediately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignment.run.processes import Watched


class Neighbors:
    """Other ranks whose processes are visible to this one. One thread starts the watch, others query it."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}

    def begin(self, processes: Mapping[int, int]) -> None:
        """Start watching the processes of these ranks."""
        # One assignment: another thread may be iterating over the old dict.
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
        """Kill a rank's process, suspended or not; do nothing for a rank of another machine."""
        if rank in self._watched:
            self._watched[rank].kill()

    def close(self) -> None:
        """Stop watching."""
        before, self._watched = self._watched, {}
        for watched in before.values():
            watched.close()
