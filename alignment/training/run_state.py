"""Everything that a run needs to go on after a restart, beside weights and optimizer: one owner, named parts.

Whatever changes while a run lasts, and would be missed, is registered here by the code that changes it. A test walks
every attribute that a step changes and fails on one that is neither registered nor excused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

import numpy as np

from alignment.engines.rng import RandomStreams, seed_streams


class Stateful(Protocol):
    """A part of the state of a run; what it gives is made of what JSON knows."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class StatefulOnEachRank(Stateful, Protocol):
    """A part whose state differs from rank to rank."""

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """The state of ``rank`` in a run that goes on with another number of ranks.

        Args:
            states: those of the ranks that there were.
            rank: of those that there are now.
        """
        ...


Part = TypeVar("Part", bound=Stateful)
EachPart = TypeVar("EachPart", bound=StatefulOnEachRank)


class RunState:
    """The parts of a run's state by name.

    Most parts are the same on every rank, and the first rank's state stands for all. The others are registered as
    such, and each rank's state is kept.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}
        self.on_each_rank: dict[str, StatefulOnEachRank] = {}
        self._marks: dict[str, Any] = {}

    def register(self, name: str, part: Part) -> Part:
        """Make ``part`` belong to the state."""
        self.parts[name] = part
        return part

    def register_on_each_rank(self, name: str, part: EachPart) -> EachPart:
        """The same for a part whose state differs from rank to rank."""
        self.on_each_rank[name] = part
        return part

    def mark(self, *names: str) -> None:
        """Remember the state of these parts: until :meth:`unmark` it is what :meth:`state_dict` gives of them.

        A step that fails half-way has moved them; what is saved then is the state from before it.
        """
        everyone = self.parts | self.on_each_rank
        self._marks = {name: everyone[name].state_dict() for name in names}

    def unmark(self) -> None:
        """Forget what :meth:`mark` remembered: the step was completed."""
        self._marks = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of every part: under ``shared`` those that are the same everywhere, under ``own`` this rank's."""
        return {"shared": self._states(self.parts), "own": self._states(self.on_each_rank)}

    def _states(self, parts: Mapping[str, Stateful]) -> dict[str, Any]:
        return {n: self._marks[n] if n in self._marks else part.state_dict() for n, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave on this rank."""
        self.load(state["shared"], state["own"])

    def load(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        ranks: Sequence[Mapping[str, Any]] = (),
        rank: int = 0,
    ) -> None:
        """Restore a state. What nobody has registered is passed over; see :meth:`unknown`.

        Args:
            shared: of the parts that are the same on every rank.
            own: of the others, on this rank.
            ranks: in place of ``own``, those of all ranks that there were, where there are more or fewer now.
            rank: this one.
        """
        self._marks = {}
        for name, part in self.parts.items():
            if name in shared:
                part.load_state_dict(shared[name])
        for name, each in self.on_each_rank.items():
            if ranks:
                each.load_state_dict(each.redistributed([state[name] for state in ranks], rank))
            elif name in own:
                each.load_state_dict(own[name])

    def unknown(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Which parts of a state nobody has registered."""
        return [*(name for name in shared if name not in self.parts), *sorted(own.keys() - self.on_each_rank.keys())]


@dataclass
class Identity:
    """Which run this is, through all of its restarts.

    Attributes:
        name: drawn at random when it began.
        attempt: how often it was started, this time included.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    attempt: int = 1

    def state_dict(self) -> dict[str, Any]:
        """Both."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; this is one more attempt."""
        self.name, self.attempt = state["name"], state["attempt"] + 1


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
    """What was decided between two steps when the state was saved.

    Attributes:
        ends: the run ends here, because a callback asked for it or because this was its last step.
        left: where a run that was asked to stop was left: after the work of a step was ``done``, or before the
            evaluation that follows the ``step`` or ends the ``epoch``; empty in a state that was saved in the course
            of the run.
    """

    ends: bool = False
    left: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Both fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.ends, self.left = bool(state["ends"]), str(state.get("left", ""))


class RandomAtStart(RandomStreams):
    """Random streams that are restored where the run goes on, not where its state is loaded.

    What happens between the two, such as a callback's ``on_train_begin``, happened before the streams were saved.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it until the run goes on."""
        self._loaded = state

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """Another number of ranks has no streams of its own: they begin anew at :meth:`restore`."""
        return {}

    def restore(self, step: int, rank: int) -> None:
        """The run goes on after ``step``; streams that there were none of are seeded by seed, step and rank."""
        if self._loaded is None:
            return
        if self._loaded:
            super().load_state_dict(self._loaded)
        else:
            seed_streams(int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1)[0]))
        self._loaded = None
