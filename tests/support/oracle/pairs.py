"""The pairs of a window of scored completions and its metrics, in the simplest form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REASONS = ("tied", "identical", "unscored", "failed")


@dataclass(frozen=True)
class Candidate:
    """A completion: token IDs, text, whether it ended with EOS, and the scores of reward functions."""

    ids: tuple[int, ...]
    text: str
    ended: bool
    reward: float | None

    def score(self, penalty: float = 0.0) -> float | None:
        """The reward minus the penalty for a completion without EOS."""
        return None if self.reward is None else self.reward - (0.0 if self.ended else penalty)


@dataclass(frozen=True)
class Prompt:
    """Token IDs, and completions in the order of generation."""

    ids: list[int]
    made: list[Candidate]


def best_against_worst(prompt: Prompt, penalty: float) -> dict[str, Any] | str:
    """Return the pair of a prompt as a row ``{prompt_ids, chosen_ids, rejected_ids, scores}``, or the reason."""
    ranked = [(score, candidate) for candidate in prompt.made if (score := candidate.score(penalty)) is not None]
    if len(ranked) < 2:
        return "unscored"
    if len({candidate.text for _, candidate in ranked}) == 1:
        return "identical"
    widest = 0.0
    found: dict[str, Any] | str = "tied"
    for high, best in ranked:
        for low, worst in ranked:
            if best.text != worst.text and high - low > widest:
                widest = high - low
                ids = {"prompt_ids": prompt.ids, "chosen_ids": list(best.ids), "rejected_ids": list(worst.ids)}
                found = {**ids, "scores": (high, low)}
    return found


def pairs_of(window: Sequence[Prompt], penalty: float = 0.0) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the pairs of a window in the order of its prompts, and the metrics of its completions.

    Means are over completions, ``pairs/*`` over prompts. Metrics without values are omitted.
    """
    found = [best_against_worst(prompt, penalty) for prompt in window]
    rows = [pair for pair in found if isinstance(pair, dict)]
    made = [candidate for prompt in window for candidate in prompt.made]
    values: dict[str, list[float]] = {
        "val/contain_eos_token": [float(candidate.ended) for candidate in made],
        "completions/mean_length": [float(len(candidate.ids)) for candidate in made],
        "completions/mean_terminated_length": [float(len(candidate.ids)) for candidate in made if candidate.ended],
        "rewards/reward/mean": [candidate.reward for candidate in made if candidate.reward is not None],
        "rewards/ignored": [float(candidate.reward is None) for candidate in made],
        "objective/scores": [score for candidate in made if (score := candidate.score(penalty)) is not None],
        "objective/scores_margin": [row["scores"][0] - row["scores"][1] for row in rows],
        "pairs/dropped": [float(isinstance(pair, str)) for pair in found],
        **{f"pairs/{reason}": [float(pair == reason) for pair in found] for reason in REASONS},
    }
    return rows, {name: sum(each) / len(each) for name, each in values.items() if each}
