"""Means as (sum, count), so that no split of a window into batches or ranks can change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Metrics of every method that compares two completions; of the 2P completions of P pairs, the chosen come first.
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")


class MetricSums:
    """Sums and counts of one window on one rank, for a fixed list of names, stored on ``device`` until reduced.

    With a fixed list, the all-reduced tensor always has the same shape: a rank whose rows lack a class contributes
    zeros. Only the ``first_rank`` contributes values of the window as a whole.
    """

    def __init__(self, names: Iterable[str], device: torch.device, first_rank: bool) -> None:
        self.names, self.first_rank = tuple(names), first_rank
        self._index = {name: i for i, name in enumerate(self.names)}
        self.values = torch.zeros((2, len(self.names)), dtype=torch.float64, device=device)

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add a sum over ``count`` items; neither is copied to the host."""
        column = self._index[name]
        for row, value in enumerate((total, count)):
            self.values[row, column] += value.detach() if isinstance(value, Tensor) else value

    def add_part(self, name: str, part: Tensor) -> None:
        """Add a rank's part of a value of the whole window, such as its loss; it counts once per window."""
        self.add(name, part, 0)
        self.values[1, self._index[name]] = 1.0 if self.first_rank else 0.0

    def add_once(self, name: str, value: Tensor) -> None:
        """Add a value of the window that is already the same on every rank."""
        if self.first_rank:
            self.add(name, value, 1)

    def items(self) -> dict[str, tuple[float, float]]:
        """``{name: (sum, count)}`` as Python floats."""
        sums, counts = self.values.tolist()
        return {name: (sums[i], counts[i]) for name, i in self._index.items()}


def means(items: Mapping[str, tuple[float, float]], sums: bool = False) -> dict[str, float]:
    """The means of all metrics with a nonzero count, and ``rewards/margins`` if both classes are present.

    With ``sums``, also ``count/chosen``, ``count/rejected`` and per-class sums such as ``rewards/chosen_sum``.
    """
    result = {name: total / count for name, (total, count) in items.items() if count}
    if "rewards/chosen" in result and "rewards/rejected" in result:
        result["rewards/margins"] = result["rewards/chosen"] - result["rewards/rejected"]
    if sums:
        sides = {name: item for name, item in items.items() if name.endswith(("/chosen", "/rejected"))}
        result |= {name.replace("rewards", "count"): n for name, (_, n) in sides.items() if "rewards" in name}
        result |= {f"{name}_sum": total for name, (total, _) in sides.items()}
    return result


class MetricHistory:
    """Reduced sums and counts since the last log entry, or since the last scheduled one."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[float, float]] = {}
        self._unasked: dict[str, tuple[float, float]] = {}

    def add(self, items: Mapping[str, tuple[float, float]]) -> None:
        """Add one window's reduced sums and counts."""
        self._unasked = {}
        for name, (total, count) in items.items():
            before = self._items.get(name, (0.0, 0.0))
            self._items[name] = (before[0] + total, before[1] + count)

    def __bool__(self) -> bool:
        return bool(self._items)

    def pop(self, sums: bool = False, *, asked: bool = True) -> dict[str, float]:
        """The means since the last call; see :func:`means` for ``sums``.

        Entries that are not scheduled (``asked``), written only because the run ends, are for :meth:`rest`.
        """
        result, self._unasked, self._items = means(self._items, sums), {} if asked else self._items, {}
        return result

    def rest(self, sums: bool = False) -> dict[str, float]:
        """The means since the last scheduled log entry when the run ended; empty if its last step was scheduled."""
        return means(self._items or self._unasked, sums)

    def state_dict(self) -> dict[str, Any]:
        """The running sums."""
        return {"items": dict(self._items), "unasked": dict(self._unasked)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._items, self._unasked = dict(state["items"]), dict(state.get("unasked", {}))


def sides(*names: str) -> tuple[str, ...]:
    """``NAME/chosen`` and ``NAME/rejected`` for each name."""
    return tuple(f"{name}/{side}" for name in names for side in ("chosen", "rejected"))


def add_rewards(sums: MetricSums, chosen: Tensor, rejected: Tensor) -> None:
    """Add the rewards of P pairs, (P,) each, and how often the chosen completion has the higher reward."""
    pairs = len(chosen)
    sums.add("rewards/chosen", chosen.sum(), pairs)
    sums.add("rewards/rejected", rejected.sum(), pairs)
    sums.add("rewards/accuracies", (chosen > rejected).sum(), pairs)


def add_sides(sums: MetricSums, name: str, values: Tensor, weights: Tensor | None = None) -> None:
    """Add (2P,) values by side, those of the chosen completions first; ``name`` is without the side.

    The values are sums over ``weights`` (2P,) items each, or single values if that is None.
    """
    pairs = len(values) // 2
    for side, part in (("chosen", slice(pairs)), ("rejected", slice(pairs, None))):
        sums.add(f"{name}/{side}", values[part].sum(), pairs if weights is None else weights[part].sum())
