"""Combine several reward sources into a weighted sum per sample. A failure on one rank is raised on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import TrainerState

from alignment.config.errors import OptionError, RewardError
from alignment.rewards.callables import raise_together
from alignment.rewards.functions import FunctionReward, score_all
from alignment.rewards.samples import RewardSource, Samples
from alignment.run.retries import NEVER, Retries


@dataclass(frozen=True)
class Scores:
    """The scores of this rank's S samples.

    Attributes:
        total: (S,) weighted sums over the sources that returned a score; None if none did.
        by_source: (S,) unweighted scores of each source, by name.
        ignored: how often a source returned no score.
        truncated: number of samples that a source truncated.
    """

    total: list[float | None]
    by_source: dict[str, list[float | None]]
    ignored: int
    truncated: int


class Rewards:
    """Reward sources with weights.

    Args:
        sources: one or more sources; duplicate names are numbered starting with the second.
        weights: one weight per source; None for 1 each.
        missing_eos_penalty: subtracted from the total of a completion without EOS; None for no penalty.
        retries: retries for functions.

    Raises:
        OptionError: the weights are not one finite number per source.
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
        self.functions = {n: s for n, s in zip(self.names, sources) if isinstance(s, FunctionReward)}
        self.weights = [1.0] * len(sources) if weights is None else list(weights)
        self.penalty = missing_eos_penalty or 0.0
        if len(self.weights) != len(sources) or not all(map(math.isfinite, self.weights)):
            raise OptionError(
                f"reward_weights: {self.weights}; expected a finite number for each of {', '.join(self.names)}"
            )

    def check(self, columns: Collection[str], where: str | None = None) -> None:
        """See :meth:`FunctionReward.check`; ``where`` names the dataset if there are several."""
        for function in self.functions.values():
            function.check(columns, where or "the dataset")

    def follow(self, state: TrainerState) -> None:
        """Pass the state of the run to functions."""
        for function in self.functions.values():
            function.state = state

    def score(self, samples: Samples) -> Scores:
        """Score this rank's samples, possibly none. Collective.

        Functions are called first, so that their failures are raised on all ranks before other sources run
        collectives.

        Raises:
            RewardError: a function failed on any rank; the same error on all ranks.
        """
        scores: dict[str, list[float | None]] = {}
        failure = None
        try:
            scores |= zip(self.functions, score_all(list(self.functions.values()), samples, self.retries))
        except RewardError as error:
            failure = error
        raise_together(failure, self.retries)
        scores |= {n: s.score(samples) for n, s in zip(self.names, self.sources) if n not in self.functions}
        by_source = {name: scores[name] for name in self.names}
        total = [self._total(values, ended) for *values, ended in zip(*by_source.values(), samples.ended)]
        ignored = sum(values.count(None) for values in by_source.values())
        return Scores(total, by_source, ignored, truncated=sum(source.truncated for source in self.sources))

    def _total(self, values: Sequence[float | None], ended: bool) -> float | None:
        said = [weight * value for weight, value in zip(self.weights, values) if value is not None]
        return sum(said) - (0.0 if ended else self.penalty) if said else None

    def close(self) -> None:
        """Release every source."""
        for source in self.sources:
            source.close()


def _distinct(names: Sequence[str]) -> list[str]:
    """Make names unique by appending the first free number to duplicates."""
    found: list[str] = []
    for name in names:
        candidates = (name if number == 1 else f"{name}_{number}" for number in range(1, len(names) + 1))
        found.append(next(candidate for candidate in candidates if candidate not in found))
    return found
