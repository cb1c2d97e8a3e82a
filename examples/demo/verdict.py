"""What the demo promises, and which of it a run has missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo.judge import Rates

START_RANGE = (0.35, 0.65)  # warm answers before: neither manner is the habit
LEAST_GAIN = 1.0  # of the mean reward by each method: log-odds of being preferred
LEAST_ACCURACY = 0.9  # of the reward model, on pairs of held-out requests
_EDGE = 1e-9  # a difference of two shares that is 0.05 in decimals may not be one in binary
FEWEST_PROMPTS = 200


@dataclass(frozen=True)
class Promise:
    """What a method has to reach.

    Attributes:
        warm: least share of warm answers.
        loss: how far the share of answers that answer the request may lie below the start model's.
    """

    warm: float = 0.85
    loss: float = 0.05


# Its reward model knows of manner and nothing of truth, so that nothing but the reference holds the truth.
ONLINE_PROMISE = Promise(warm=0.75, loss=0.1)


@dataclass(frozen=True)
class Measured:
    """One row of the table: a model by its title, and what its sampled answers are like.

    Attributes:
        title: of the row.
        rates: what the rules say.
        reward: mean score of the answers by the reward model.
        seconds: that training took.
        promise: what it has to reach.
    """

    title: str
    rates: Rates
    reward: float
    seconds: float
    promise: Promise = Promise()


def missed(start: Measured, trained: Sequence[Measured], accuracy: float) -> list[str]:
    """Each promise that was not kept, as one clause with its figures; empty when all were.

    Args:
        start: the start model.
        trained: every model trained from it.
        accuracy: share of held-out pairs that the reward model ranks rightly.
    """
    low, high = START_RANGE
    faults = []
    if start.rates.count < FEWEST_PROMPTS:
        faults.append(f"{start.rates.count} held-out prompts, wanted at least {FEWEST_PROMPTS}")
    if not low <= start.rates.warm <= high:
        faults.append(f"{start.title}: warm answers {start.rates.warm:.3f}, wanted {low} to {high}")
    if accuracy < LEAST_ACCURACY:
        faults.append(
            f"reward model: {accuracy:.3f} of the held-out pairs ranked rightly, wanted at least {LEAST_ACCURACY}"
        )
    reward = start.reward + LEAST_GAIN
    for model in trained:
        promise = model.promise
        least = start.rates.answered - promise.loss
        if model.rates.warm < promise.warm:
            faults.append(f"{model.title}: warm answers {model.rates.warm:.3f}, wanted at least {promise.warm}")
        if not model.reward >= reward - _EDGE:  # so written, NaN is missed as well
            faults.append(
                f"{model.title}: mean reward {model.reward:.2f}, wanted at least {reward:.2f} "
                f"({LEAST_GAIN} above {start.title})"
            )
        if model.rates.answered < least - _EDGE:
            faults.append(
                f"{model.title}: requests answered {model.rates.answered:.3f}, wanted at least {least:.3f} "
                f"({promise.loss} below {start.title})"
            )
    return faults
