"""Everything that a resume needs except weights and optimizer: one owner with named parts.

The code that changes something during a run registers it here if a resumed run needs it. A test walks all attributes
that a step changes and fails on any that is neither registered nor excused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar


class Stateful(Protocol):
    """A part of the state of a run; its state consists of JSON types."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


class StatefulOnEachRank(Stateful, Protocol):
    """A part whose state differs between ranks."""

    def redistributed(self, states: Sequence[Any], rank: int) -> Any: ...  # of a run with another number of ranks


Part = TypeVar("Part", bound=Stateful)
EachPart = TypeVar("EachPart", bound=StatefulOnEachRank)


class RunState:
    """The parts of a run's state by name: most are equal on all ranks, the others have one state per rank."""

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}
        self.on_each_rank: dict[str, StatefulOnEachRank] = {}

    def register(self, name: str, part: Part) -> Part:
        """Register a part whose state is equal on all ranks; return it."""
        self.parts[name] = part
        return part

    def register_on_each_rank(self, name: str, part: EachPart) -> EachPart:
        """Register a part whose state differs between ranks; return it."""
        self.on_each_rank[name] = part
        return part

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of the parts that are equal on all ranks, and of the others on this rank."""
        shared = {name: part.state_dict() for name, part in self.parts.items()}
        return shared, {name: each.state_dict() for name, each in self.on_each_rank.items()}

    def load(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returns. Parts that are not registered are ignored; see :meth:`unknown`."""
        states = {**shared, **own}
        for name, part in {**self.parts, **self.on_each_rank}.items():
            if name in states:
                part.load_state_dict(states[name])

    def redistributed(self, former: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
        """Return the own state of ``rank`` in a run that resumes with another number of ranks than had these."""
        own = self.on_each_rank.items()
        return {name: part.redistributed([each[name] for each in former], rank) for name, part in own}

    def unknown(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Return the names of parts of a state that are not registered."""
        return [*(name for name in shared if name not in self.parts), *sorted(own.keys() - self.on_each_rank.keys())]


@dataclass
class StatefulFields:
    """A part whose state consists of its fields."""

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fields that the state has."""
        for each in fields(self):
            setattr(self, each.name, state.get(each.name, getattr(self, each.name)))


@dataclass
class Identity(StatefulFields):
    """Identifies a run across its attempts: a random name, and the number of starts, this one included."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    attempt: int = 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, and count this attempt."""
        super().load_state_dict(state)
        self.attempt += 1
