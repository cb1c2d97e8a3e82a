"""Everything that a run needs to go on after a restart, beside weights and optimizer: one owner, named parts.

Whatever changes while a run lasts, and would be missed, is registered here by the code that changes it. A test walks
every attribute that a step changes and fails on one that is neither registered nor excused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

from alignment.engines.rng import RandomStreams


class Stateful(Protocol):
    """A part of the state of a run on this rank; what it gives is made of what JSON knows."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


Part = TypeVar("Part", bound=Stateful)


class RunState:
    """The parts of a run's state by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}
        self._waiting: dict[str, Any] = {}

    def register(self, name: str, part: Part) -> Part:
        """Make ``part`` belong to the state; it gets what was loaded for it, if it was made after that."""
        self.parts[name] = part
        if name in self._waiting:
            part.load_state_dict(self._waiting.pop(name))
        return part

    def state_dict(self) -> dict[str, Any]:
        """The state of every part."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, of parts that will be registered later once they are."""
        self._waiting = dict(state)
        for name in [name for name in self.parts if name in self._waiting]:
            self.parts[name].load_state_dict(self._waiting.pop(name))

    @property
    def missing(self) -> list[str]:
        """What was loaded for parts that nobody has registered."""
        return list(self._waiting)


@dataclass
class Totals:
    """Sums over a run, for rates, means and the log.

    Attributes:
        tokens: that were trained on.
        rows: the same.
        reduced_windows: windows that were computed in a reduced form.
        loss_sum, losses: of all windows, and how many of them had one.
        seconds: that the run took before it was restarted.
        last: what the newest step says of itself, such as its learning rate.
    """

    tokens: int = 0
    rows: int = 0
    reduced_windows: int = 0
    loss_sum: float = 0.0
    losses: float = 0.0
    seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for each in fields(self):
            setattr(self, each.name, state[each.name])


@dataclass
class Boundary:
    """How far a run is between two steps, where its state is saved in the midst of it.

    Attributes:
        epoch_ends: what an epoch ends with is still to be done.
    """

    epoch_ends: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Its only field."""
        return {"epoch_ends": self.epoch_ends}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.epoch_ends = bool(state["epoch_ends"])


class RandomAtStart(RandomStreams):
    """Random streams that are restored where the run goes on, not where its state is loaded.

    Between the two a DataLoader's iterator draws once from torch's generator, as it did before the restart if that was
    within an epoch; at the end of one, the draw is still to come.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it until the run goes on."""
        self._loaded = state

    def before(self, step: int) -> None:
        """Called before the iterator of an epoch is made, of which ``step`` windows are done."""
        if step == 0:
            self.after()

    def after(self) -> None:
        """Called when it has been made."""
        if self._loaded is not None:
            super().load_state_dict(self._loaded)
            self._loaded = None
