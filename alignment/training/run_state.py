"""What the training loop adds to the state of a run: totals, the decisions between two steps, and random streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from alignment.engines.rng import RandomStreams, seed_streams


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

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for each in fields(self):
            setattr(self, each.name, state.get(each.name, getattr(self, each.name)))


@dataclass
class Boundary:
    """Decisions between two steps at the time of a save.

    Attributes:
        ends: whether the run ends here, because of a callback or because this was its last step.
        left: where a run that was asked to stop was interrupted: after the step was ``done``, or before the
            evaluation that follows the ``step`` or ends the ``epoch``; empty in a state saved while training
            continues.
    """

    ends: bool = False
    left: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return both fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.ends, self.left = bool(state["ends"]), str(state.get("left", ""))


class RandomAtStart(RandomStreams):
    """Random streams that are restored when training continues, not when the state is loaded.

    What happens in between, such as a callback's ``on_train_begin``, happened before the streams were saved.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._loaded: Mapping[str, Any] | None = None

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
