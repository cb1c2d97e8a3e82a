"""Choose the placement of frozen models from the memory plan, before any weights are loaded.

The result must be the same on every rank and in every attempt, so it does not depend on the memory that happens to be
free. It is planned for the smallest GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from alignment.config.dtypes import planned
from alignment.config.options_online import OnlineOptions
from alignment.engines.collectives import device, largest_numbers
from alignment.engines.memory import total_bytes
from alignment.models.source import ModelSource
from alignment.planning.gpu_terms import RESERVE
from alignment.planning.plan import Frozen, NotPlanned
from alignment.planning.planner import Planner
from alignment.planning.weights import weights_of

_CACHES = 0.1  # share of a GPU that is left to the KV caches of rollouts, whose batch size depends on it


class Choice(NamedTuple):
    """A placement, and the reason for choosing it."""

    placement: str
    why: str


class Cards:
    """The GPUs of a run, on which frozen models are placed one after another.

    Args:
        planner: plans the memory of the policy alone.
        card: bytes of the smallest GPU.
        tokens: tokens of the longest sequence; None: what the options allow.

    Raises:
        NotPlanned: the policy cannot be counted.
    """

    def __init__(self, planner: Planner, card: float, tokens: int | None = None) -> None:
        self.planner, self.card, self.tokens = planner, card, tokens
        self._limit = card * (1 - _CACHES if isinstance(planner.options, OnlineOptions) else 1) / (1 + RESERVE)
        plan = planner.plan(tokens)
        peaks = {phase: plan.peak(phase) for phase in plan.gpu}
        if peaks.get("rollout", 0) > self._limit:
            del peaks["rollout"]  # weights that do not fit are not gathered for it
        self._taken = float(max(peaks.values()))  # bytes of training, and of the models placed so far

    def place(self, source: ModelSource, *, alone: bool = False) -> Choice | None:
        """Return the fastest placement that fits: replicated, else sharded, else in host memory; None if unknown.

        Args:
            source: the model, with its quantization.
            alone: whether the model is released before training starts.
        """
        ranks = self.planner.ranks
        weights = weights_of(source, self.planner.engines.compute)
        if weights is None:
            return None
        placement, fits, size, others = "offload", "do not fit", 0.0, 0.0
        for name in ("replica", "sharded"):  # on one rank, the same
            size = weights.placed(name, ranks)
            try:
                others = self._passing(source, name) - size if alone else self._taken
            except NotPlanned:
                return None
            if size + others <= self._limit:
                placement, fits = name, "fit"
                break
        if not alone:
            self.take(source, placement)
        return Choice(
            placement, f"by size: {_gb(size)} {fits} in addition to {_gb(others)} on a GPU of {_gb(self.card)}"
        )

    def take(self, source: ModelSource, placement: str) -> None:
        """Account for a model with this placement."""
        weights = weights_of(source, self.planner.engines.compute)
        self._taken += 0.0 if weights is None else weights.placed(placement, self.planner.ranks)

    def _passing(self, source: ModelSource, placement: str) -> int:
        """Return the peak of a pass of a model that is alone on the GPUs."""
        model = Frozen("reference", source, placement, "reference", alone=True)
        return replace(self.planner, rewards=(model,)).plan(self.tokens).peak("reference")


def smallest_card() -> float | None:
    """Return the bytes of the smallest GPU that a process can use; None without GPUs. Collective.

    None also if the run is planned for another machine whose GPUs are unknown.
    """
    here, machine = device(), planned()
    if machine is not None:
        return machine.card if machine.cuda else None
    if here.type != "cuda":
        return None
    return -largest_numbers([-float(total_bytes(here))])[0]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
