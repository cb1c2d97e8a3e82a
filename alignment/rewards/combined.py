"""Several reward sources as one: their weighted sum per sample, with every rank failing where one does."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import TrainerState

from alignment.config.errors import OptionError, RewardError
from alignment.engines.watch.retries import NEVER, Retries
from alignment.rewards.callables import raise_together
from alignment.rewards.functions import FunctionReward, score_all
from alignment.rewards.samples import RewardSource, Samples


@dataclass(frozen=True)
class Scores:
    """The scores of this rank's S samples.

    Attributes:
        total: (S,) weighted sums over the sources that said something; None where none did.
        by_source: (S,) what each source said, by its name, unweighted.
        ignored: how many times a source said nothing.
        truncated: how many of the samples a source had to cut.
    """

    total: list[float | None]
    by_source: dict[str, list[float | None]]
    ignored: int
    truncated: int


class Rewards:
    """Reward sources with their weights.

    Args:
        sources: one or more; a name that several have is numbered from the second on.
        weights: one per source; None means 1 for each.
        missing_eos_penalty: taken off the total of a completion that did not end by itself; None for nothing.
        retries: of functions.

    Raises:
        OptionError: weights that are not one finite number per source.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        weights: Sequence[float] | None = None,
        missing_eos_penalty: float | None = None,
        retries: Retries = NEVER,
    ) -> None:
        self.retries = retries
        self.sources, self.names = list(sources), _distinct([source.name for source in sources])
        self.weights = [1.0] * len(sources) if weights is None else list(weights)
        self.penalty = missing_eos_penalty or 0.0
        if len(self.weights) != len(sources):
            raise OptionError(
                f"reward_weights: {len(self.weights)} weights for {len(sources)} reward sources "
                f"({', '.join(self.names)}); give one for each"
            )
        for weight, name in zip(self.weights, self.names):
            if not math.isfinite(weight):
                raise OptionError(f"reward_weights: {weight} for {name}; set a finite number")

    def check(self, columns: Collection[str], where: str | None = None) -> None:
        """Whether the functions can be called with rows that have these further columns.

        Args:
            columns: their names.
            where: names the rows in messages, such as a part of a mixture; None where there is but one dataset.

        Raises:
            OptionError: as :meth:`FunctionReward.check`.
        """
        for source in self.sources:
            if isinstance(source, FunctionReward):
                source.check(columns, where)

    def follow(self, state: TrainerState) -> None:
        """Let functions see the state of the run."""
        for source in self.sources:
            if isinstance(source, FunctionReward):
                source.state = state

    def score(self, samples: Samples) -> Scores:
        """The scores of this rank's samples, of which there may be none. Collective.

        Functions come first, and what fails in them fails on every rank before any source that calls collectives.

        Raises:
            RewardError: a function failed, here or on another rank; the same on every rank.
        """
        scores: dict[str, list[float | None]] = {}
        functions = {n: s for n, s in zip(self.names, self.sources) if isinstance(s, FunctionReward)}
        failure = None
        try:
            scores |= zip(functions, score_all(list(functions.values()), samples, self.retries))
        except RewardError as error:
            failure = error
        raise_together(failure, self.retries)
        scores |= {n: s.score(samples) for n, s in zip(self.names, self.sources) if n not in functions}
        by_source = {name: scores[name] for name in self.names}
        total = [self._total(values) for values in zip(*by_source.values())]
        for index, ended in enumerate(samples.ended):
            reached = total[index]
            if reached is not None and not ended:
                total[index] = reached - self.penalty
        ignored = sum(values.count(None) for values in by_source.values())
        return Scores(total, by_source, ignored, truncated=sum(source.truncated for source in self.sources))

    def _total(self, values: Sequence[float | None]) -> float | None:
        said = [weight * value for weight, value in zip(self.weights, values) if value is not None]
        return sum(said) if said else None

    def close(self) -> None:
        """Release every source."""
        for source in self.sources:
            source.close()


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, each that occurred before with the first free number behind it."""
    found: list[str] = []
    for name in names:
        candidates = (name if number == 1 else f"{name}_{number}" for number in range(1, len(names) + 1))
        found.append(next(candidate for candidate in candidates if candidate not in found))
    return found
