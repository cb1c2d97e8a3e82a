"""Everything that a resume needs except weights and optimizer: one owner with named parts.

The code that changes something during a run registers it here if a resumed run needs it. A test walks all attributes
that a step changes and fails on any that is neither registered nor excused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

import numpy as np

from alignment.data.windows import WindowCounts
from alignment.engines.rng import RandomStreams, seed_streams


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


@dataclass
class Totals:
    """Sums over a run, for rates, means and the log.

    Attributes:
        tokens: tokens trained on.
        rows: rows trained on.
        reduced_windows: windows that were computed in a reduced form.
        reduced_in_a_row: those since the last window that was not.
        loss_sum, losses: sum of the losses of all windows, and the number of windows with a loss.
        seconds: duration of the run before it was restarted.
        last: values of the newest step, such as its learning rate.
    """

    tokens: int = 0
    rows: int = 0
    reduced_windows: int = 0
    reduced_in_a_row: int = 0
    loss_sum: float = 0.0
    losses: float = 0.0
    seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)

    def add(self, items: Mapping[str, tuple[float, float]], counts: WindowCounts) -> None:
        """Add what a window gave: its metrics, without a loss if it was skipped, and the counts of its rows."""
        loss, losses = items.get("loss", (0.0, 0.0))
        self.tokens += counts.sequence_tokens
        self.rows += counts.rows
        self.loss_sum += loss
        self.losses += losses

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for each in fields(self):
            setattr(self, each.name, state.get(each.name, getattr(self, each.name)))


# What happens between two steps, in this order; "end epoch" is followed by further logs and evaluations if it does.
AFTER_STEP = ("log", "evaluate", "end epoch", "save")
AFTER_EPOCH = ("log", "evaluate")
# In a state written before actions were saved: where the run was interrupted, and what is left to do there.
_LEFT = {"": ["announce save"], "done": [], "step": [*AFTER_STEP], "epoch": [*AFTER_EPOCH, "save"]}


@dataclass
class Boundary:
    """What is still to be done between two steps.

    Attributes:
        ends: whether the run ends here because of a callback.
        due: actions that are due, in order: those in ``AFTER_STEP``, and ``announce save``, which notifies the
            callbacks of a checkpoint. A checkpoint contains those that its resume must do first.
    """

    ends: bool = False
    due: list[str] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return both fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.ends = bool(state["ends"])
        self.due = list(state["due"]) if "due" in state else list(_LEFT[state.get("left", "")])


class RandomAtStart(RandomStreams):
    """Random streams that are restored when training continues, not when the state is loaded.

    What happens in between, such as a callback's ``on_train_begin``, happened before the streams were saved.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._loaded: Mapping[str, Any] | None = None
        self._held: dict[str, Any] | None = None

    def hold(self) -> None:
        """Let :meth:`state_dict` return the present state until :meth:`release`: a step may fail half-way."""
        self._held = super().state_dict()

    def release(self) -> None:
        """Let :meth:`state_dict` return the state at the time of its call: the step was completed."""
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the streams, or the held one."""
        return super().state_dict() if self._held is None else self._held

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until training continues."""
        self._loaded = state

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """Return no state: with a different number of ranks, :meth:`restore` seeds the streams."""
        return {}

    def restore(self, step: int, rank: int) -> None:
        """Continue after ``step``; streams without a state are seeded by seed, step and rank."""
        if self._loaded is None:
            return
        if self._loaded:
            super().load_state_dict(self._loaded)
        else:
            seed_streams(int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1)[0]))
        self._loaded = None
