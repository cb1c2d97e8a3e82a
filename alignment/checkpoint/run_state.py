"""Everything that a resume needs except weights and optimizer: one owner with named parts.

The code that changes something during a run registers it here if a resumed run needs it. A test walks all attributes
that a step changes and fails on any that is neither registered nor excused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar


class Stateful(Protocol):
    """A part of the state of a run; its state consists of JSON types."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class StatefulOnEachRank(Stateful, Protocol):
    """A part whose state differs between ranks."""

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """Return the state of ``rank`` in a run that resumes with a different number of ranks.

        Args:
            states: states of all former ranks.
            rank: one of the current ranks.
        """
        ...


Part = TypeVar("Part", bound=Stateful)
EachPart = TypeVar("EachPart", bound=StatefulOnEachRank)


class RunState:
    """The parts of a run's state by name.

    Most parts are equal on all ranks, and only the first rank's state is kept. Parts registered on each rank have
    one state per rank.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}
        self.on_each_rank: dict[str, StatefulOnEachRank] = {}

    def register(self, name: str, part: Part) -> Part:
        """Register ``part`` as part of the state."""
        self.parts[name] = part
        return part

    def register_on_each_rank(self, name: str, part: EachPart) -> EachPart:
        """Register a part whose state differs between ranks."""
        self.on_each_rank[name] = part
        return part

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every part: under ``shared`` those equal on all ranks, under ``own`` this rank's."""
        return {"shared": _states(self.parts), "own": _states(self.on_each_rank)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict` on this rank."""
        self.load(state["shared"], state["own"])

    def load(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        ranks: Sequence[Mapping[str, Any]] = (),
        rank: int = 0,
    ) -> None:
        """Restore a state. Parts that are not registered are ignored; see :meth:`unknown`.

        Args:
            shared: states of the parts that are equal on all ranks.
            own: states of the others on this rank.
            ranks: replaces ``own`` if the number of ranks has changed: the states of all former ranks.
            rank: this rank.
        """
        for name, part in self.parts.items():
            if name in shared:
                part.load_state_dict(shared[name])
        for name, each in self.on_each_rank.items():
            if ranks:
                each.load_state_dict(each.redistributed([state[name] for state in ranks], rank))
            elif name in own:
                each.load_state_dict(own[name])

    def unknown(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Return the names of parts of a state that are not registered."""
        return [*(name for name in shared if name not in self.parts), *sorted(own.keys() - self.on_each_rank.keys())]


def _states(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


@dataclass
class Identity:
    """Identifies a run across its attempts.

    Attributes:
        name: random name, chosen when the run began.
        attempt: number of starts, this one included.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    attempt: int = 1

    def state_dict(self) -> dict[str, Any]:
        """Return both attributes."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`, and count this attempt."""
        self.name, self.attempt = state["name"], state["attempt"] + 1
