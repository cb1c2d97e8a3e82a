"""What every method that compares two answers measures: sums over the pairs of a micro-batch, chosen answers first."""

from __future__ import annotations

from torch import Tensor

from alignment.reporting.metrics import MetricSums

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")


def sides(*names: str) -> tuple[str, ...]:
    """``NAME/chosen`` and ``NAME/rejected`` for each name."""
    return tuple(f"{name}/{side}" for name in names for side in ("chosen", "rejected"))


def add_rewards(sums: MetricSums, chosen: Tensor, rejected: Tensor) -> None:
    """Add the rewards of P pairs, (P,) each, and how often the chosen answer has the higher one."""
    pairs = len(chosen)
    sums.add("rewards/chosen", chosen.sum(), pairs)
    sums.add("rewards/rejected", rejected.sum(), pairs)
    sums.add("rewards/accuracies", (chosen > rejected).sum(), pairs)


def add_sides(sums: MetricSums, name: str, values: Tensor, weights: Tensor | None = None) -> None:
    """Add (2P,) values by side; they are sums over ``weights`` (2P,) things each, or means over one where None."""
    pairs = len(values) // 2
    for side, part in (("chosen", slice(pairs)), ("rejected", slice(pairs, None))):
        sums.add(f"{name}/{side}", values[part].sum(), pairs if weights is None else weights[part].sum())
