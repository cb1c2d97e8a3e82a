"""Rank the completions of a window by rewards (a score per completion) or a judge (a comparison of two)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from alignment.online.completions import Generated, samples_of
from alignment.reporting.metrics import MetricSums
from alignment.rewards.combined import Rewards
from alignment.rewards.functions import FunctionReward
from alignment.rewards.judges import Judge
from alignment.rewards.llm_judge import LLMJudge
from alignment.rewards.samples import in_groups, one_turn, spoken

# Why a prompt gives no pair. A tie is dropped: training on it would favor whichever completion came first.
TIED, IDENTICAL, UNSCORED, FAILED = "tied", "identical", "unscored", "failed"
REASONS = (TIED, IDENTICAL, UNSCORED, FAILED)
REMEDIES = {
    TIED: "the scores of different completions are equal: use a reward that distinguishes them, or add a second one",
    IDENTICAL: "the completions of a prompt are the same text: raise temperature or num_generations",
    UNSCORED: "fewer than two completions have a score: return a number for each completion instead of None",
    FAILED: "the judge gives no verdict: check its answers in completions.jsonl",
}


@dataclass(frozen=True)
class Ranking:
    """The ranking of one prompt's completions.

    Attributes:
        outcome: indices of the better and the worse completion, or one of :data:`REASONS`.
        scores: one per completion, None where scoring failed; None altogether with a judge.
    """

    outcome: tuple[int, int] | str
    scores: tuple[float | None, ...] | None = None


def best_and_worst(scores: Sequence[float | None], texts: Sequence[str]) -> Ranking:
    """Return the best and the worst completion by score, among those with different texts.

    Identical texts may score differently: one was truncated, or the reward source is not deterministic.
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
    """A prompt's first completion, to compare later ones with; ``score`` is None if not available."""

    text: str
    score: float | None


class RewardRanker:
    """Ranks completions by their rewards. All ranks must call it equally often, even with nothing to rank."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self._truncates = not all(isinstance(source, FunctionReward) for source in rewards.sources)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that :meth:`rank` adds."""
        own = (f"rewards/{name}/mean" for name in self.rewards.names)
        return ("objective/scores", "objective/scores_margin", *own, "rewards/ignored", "rewards/truncated")

    def rank(
        self, groups: Sequence[Generated], columns: Sequence[str], seed: int, sums: MetricSums | None
    ) -> list[Ranking]:
        """Return a ranking for each prompt, whose rows have these ``columns``, and add metrics to ``sums``."""
        samples = samples_of(groups, columns)
        scores = self.rewards.score(samples)
        if sums is not None:
            own = {f"rewards/{name}/mean": values for name, values in scores.by_source.items()}
            for name, values in {"objective/scores": scores.total, **own}.items():
                given = [value for value in values if value is not None]
                sums.add(name, sum(given), len(given))
            sums.add("rewards/ignored", scores.ignored, len(samples) * len(self.rewards.names))
            if self._truncates:
                sums.add("rewards/truncated", scores.truncated, len(samples))
        size = len(groups[0].completions) if groups else 1
        return [best_and_worst(own, g.texts) for own, g in zip(in_groups(scores.total, size), groups, strict=True)]

    def wins(
        self, groups: Sequence[Generated], rankings: Sequence[Ranking], others: Sequence[FirstAnswer], seed: int
    ) -> list[float | None]:
        """Return 1, 0.5 or 0 per prompt: its first completion is better than, as good as or worse than the other."""
        points: list[float | None] = []
        for ranking, (_, score) in zip(rankings, others, strict=True):
            mine = None if ranking.scores is None else ranking.scores[0]
            if mine is None or score is None:
                points.append(None)
            else:
                points.append(0.5 if mine == score else float(mine > score))
        return points


class JudgeRanker:
    """Ranks two completions of a prompt by a judge, with the methods of :class:`RewardRanker`."""

    metrics: tuple[str, ...] = ()

    def __init__(self, judge: Judge) -> None:
        self.judge, self._asks_twice = judge, False

    def ask_twice(self) -> None:
        """Let :meth:`wins` show every pair in both orders: two different verdicts are a tie."""
        self._asks_twice = True
        if isinstance(self.judge.code, LLMJudge):  # which would not tell them from a missing verdict
            self.judge.code.settings.both_orders = False

    def rank(
        self, groups: Sequence[Generated], columns: Sequence[str], seed: int, sums: MetricSums | None
    ) -> list[Ranking]:
        pairs = [group.texts if len(group.texts) == 2 else None for group in groups]
        verdicts = self._verdicts(groups, pairs, seed)
        return [Ranking(v if isinstance(v, str) else (v, 1 - v)) for v in verdicts]

    def wins(
        self, groups: Sequence[Generated], rankings: Sequence[Ranking], others: Sequence[FirstAnswer], seed: int
    ) -> list[float | None]:
        pairs = [(ours.texts[0], theirs.text) for ours, theirs in zip(groups, others, strict=True)]
        points: dict[int | str, float] = {0: 1.0, 1: 0.0, IDENTICAL: 0.5}
        wins = [points.get(verdict) for verdict in self._verdicts(groups, pairs, seed)]
        if not self._asks_twice:
            return wins
        losses = [points.get(verdict) for verdict in self._verdicts(groups, [pair[::-1] for pair in pairs], seed)]
        return [None if win is None or loss is None else (win + 1 - loss) / 2 for win, loss in zip(wins, losses)]

    def _verdicts(
        self, groups: Sequence[Generated], pairs: Sequence[tuple[str, ...] | None], seed: int
    ) -> list[int | str]:
        """Return the judge's choice, or why there is none; identical texts are not sent to the judge."""
        asked = [n for n, pair in enumerate(pairs) if pair is not None and pair[0] != pair[1]]
        shown = []
        for number in asked:
            prompt = groups[number].source.prompt
            shown.append([one_turn(prompt, spoken(prompt, text)) for text in pairs[number] or ()])
        answers = self.judge.verdicts(
            [turns[0][0] for turns in shown],
            [[completion for _, completion in turns] for turns in shown],
            seed,
            [groups[n].place for n in asked],
        )
        found: list[int | str] = [UNSCORED if pair is None else IDENTICAL for pair in pairs]
        for number, answer in zip(asked, answers, strict=True):
            found[number] = FAILED if answer < 0 else answer
        return found


Ranker: TypeAlias = RewardRanker | JudgeRanker
