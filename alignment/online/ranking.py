"""Who ranks the completions of a window: rewards that score each one, or a judge that compares two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from alignment.online.completions import Generated, samples_of
from alignment.reporting.metrics import MetricSums
from alignment.rewards.combined import Rewards
from alignment.rewards.functions import FunctionReward
from alignment.rewards.judges import Judge
from alignment.rewards.samples import in_groups, spoken

# Why a prompt gives no pair. A tie has no better side: trained on, it would teach whatever came first.
TIED, IDENTICAL, UNSCORED, FAILED = "tied", "identical", "unscored", "failed"
REASONS = (TIED, IDENTICAL, UNSCORED, FAILED)


@dataclass(frozen=True)
class Ranking:
    """What was found of one prompt's completions.

    Attributes:
        outcome: the numbers of the better and the worse completion, or one of :data:`REASONS`.
        scores: of every completion; None where it has none, or altogether where a judge decided.
    """

    outcome: tuple[int, int] | str
    scores: tuple[float | None, ...] | None = None


def best_and_worst(scores: Sequence[float | None], texts: Sequence[str]) -> Ranking:
    """The best completion against the worst one, by score; of those with different texts.

    One text may have two scores: for how it ended, or from a source that is not sure of itself.
    """
    scored = [(score, number) for number, score in enumerate(scores) if score is not None]
    if len(scored) < 2:
        return Ranking(UNSCORED, tuple(scores))
    gaps = [
        (high - low, better, worse)
        for high, better in scored
        for low, worse in scored
        if high > low and texts[better] != texts[worse]
    ]
    if gaps:
        _, better, worse = max(gaps, key=lambda entry: entry[0])
        return Ranking((better, worse), tuple(scores))
    return Ranking(TIED if len({texts[number] for _, number in scored}) > 1 else IDENTICAL, tuple(scores))


class FirstAnswer(NamedTuple):
    """The first completion of a prompt, to compare others with; ``score`` is None where it has none."""

    text: str
    score: float | None


def first_answers(groups: Sequence[Generated], rankings: Sequence[Ranking]) -> list[FirstAnswer]:
    """What there is to keep of completions that others will be compared with."""
    scores = (None if ranking.scores is None else ranking.scores[0] for ranking in rankings)
    return [FirstAnswer(group.texts[0], score) for group, score in zip(groups, scores, strict=True)]


class Ranker(Protocol):
    """Ranks completions. Every rank calls it equally often, also with nothing to rank."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what :meth:`rank` measures."""
        ...

    def rank(
        self, groups: Sequence[Generated], columns: Sequence[str], seed: int, sums: MetricSums | None
    ) -> list[Ranking]:
        """A ranking for each prompt, whose rows have these ``columns``; what is measured goes to ``sums``."""
        ...

    def wins(
        self,
        groups: Sequence[Generated],
        rankings: Sequence[Ranking],
        others: Sequence[FirstAnswer],
        seed: int,
    ) -> list[float | None]:
        """For each prompt 1, 0.5 or 0: its first completion is better than the other's, as good, or worse."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class RewardRanker:
    """Scores every completion."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self.cuts = not all(isinstance(source, FunctionReward) for source in rewards.sources)

    @property
    def metrics(self) -> tuple[str, ...]:
        own = (f"rewards/{name}/mean" for name in self.rewards.names)
        return ("objective/scores", "objective/scores_margin", *own, "rewards/ignored", "rewards/truncated")

    def rank(
        self, groups: Sequence[Generated], columns: Sequence[str], seed: int, sums: MetricSums | None
    ) -> list[Ranking]:
        samples = samples_of(groups, columns)
        scores = self.rewards.score(samples)
        if sums is not None:
            for name, values in {"objective/scores": scores.total, **self._by_source(scores.by_source)}.items():
                given = [value for value in values if value is not None]
                sums.add(name, sum(given), len(given))
            sums.add("rewards/ignored", scores.ignored, len(samples) * len(self.rewards.names))
            if self.cuts:
                sums.add("rewards/truncated", scores.truncated, len(samples))
        size = len(groups[0].completions) if groups else 1
        return [best_and_worst(own, g.texts) for own, g in zip(in_groups(scores.total, size), groups, strict=True)]

    def _by_source(self, scores: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
        return {f"rewards/{name}/mean": values for name, values in scores.items()}

    def wins(
        self,
        groups: Sequence[Generated],
        rankings: Sequence[Ranking],
        others: Sequence[FirstAnswer],
        seed: int,
    ) -> list[float | None]:
        return [_compared(ours, theirs) for ours, theirs in zip(rankings, others, strict=True)]

    def close(self) -> None:
        self.rewards.close()


class JudgeRanker:
    """Compares the two completions of a prompt."""

    metrics: tuple[str, ...] = ()

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def rank(
        self, groups: Sequence[Generated], columns: Sequence[str], seed: int, sums: MetricSums | None
    ) -> list[Ranking]:
        pairs = [group.texts if len(group.texts) == 2 else None for group in groups]
        verdicts = self._verdicts(groups, pairs, seed)
        return [Ranking(v if isinstance(v, str) else (v, 1 - v)) for v in verdicts]

    def wins(
        self,
        groups: Sequence[Generated],
        rankings: Sequence[Ranking],
        others: Sequence[FirstAnswer],
        seed: int,
    ) -> list[float | None]:
        pairs = [(ours.texts[0], theirs.text) for ours, theirs in zip(groups, others, strict=True)]
        points: dict[int | str, float] = {0: 1.0, 1: 0.0, IDENTICAL: 0.5}
        return [points.get(verdict) for verdict in self._verdicts(groups, pairs, seed)]

    def _verdicts(
        self, groups: Sequence[Generated], pairs: Sequence[tuple[str, ...] | None], seed: int
    ) -> list[int | str]:
        """The judge's number of the better text, or why there is none; identical texts are not shown to it."""
        asked = [n for n, pair in enumerate(pairs) if pair is not None and pair[0] != pair[1]]
        answers = self.judge.verdicts(
            [groups[n].source.prompt for n in asked],
            [[spoken(groups[n].source.prompt, text) for text in pairs[n] or ()] for n in asked],
            seed,
            [groups[n].place for n in asked],
        )
        found: list[int | str] = [UNSCORED if pair is None else IDENTICAL for pair in pairs]
        for number, answer in zip(asked, answers, strict=True):
            found[number] = FAILED if answer < 0 else answer
        return found

    def close(self) -> None:
        """A judge holds nothing."""


def _compared(ours: Ranking, theirs: FirstAnswer) -> float | None:
    assert ours.scores is not None
    mine, other = ours.scores[0], theirs.score
    if mine is None or other is None:
        return None
    return 0.5 if mine == other else float(mine > other)
