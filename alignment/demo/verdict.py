"""What the demo promises, and which of it a run has missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignment.demo.judge import Rates

START_RANGE = (0.35, 0.65)  # warm answers before: neither manner is the habit
TRAINED_LEAST = 0.85  # warm answers after each method
LARGEST_LOSS = 0.05  # of the share of answers that answer the request
_EDGE = 1e-9  # a difference of two shares that is 0.05 in decimals may not be one in binary
FEWEST_PROMPTS = 200


@dataclass(frozen=True)
class Measured:
    """One row of the table: a model by its title, and what its sampled answers are like."""

    title: str
    rates: Rates
    seconds: float


def missed(start: Measured, trained: Sequence[Measured]) -> list[str]:
    """Each promise that was not kept, as one clause with its figures; empty when all were."""
    low, high = START_RANGE
    faults = []
    if start.rates.count < FEWEST_PROMPTS:
        faults.append(f"{start.rates.count} held-out prompts, wanted at least {FEWEST_PROMPTS}")
    if not low <= start.rates.warm <= high:
        faults.append(f"{start.title}: warm answers {start.rates.warm:.3f}, wanted {low} to {high}")
    least = start.rates.answered - LARGEST_LOSS
    for model in trained:
        if model.rates.warm < TRAINED_LEAST:
            faults.append(f"{model.title}: warm answers {model.rates.warm:.3f}, wanted at least {TRAINED_LEAST}")
        if model.rates.answered < least - _EDGE:
            faults.append(
                f"{model.title}: requests answered {model.rates.answered:.3f}, wanted at least {least:.3f} "
                f"({LARGEST_LOSS} below {start.title})"
            )
    return faults
