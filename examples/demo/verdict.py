"""The rules that judge an answer, what the demo promises by them, and which of it a run has missed.

The rules decide from the text alone in which manner an answer is and whether it answers the request. An answer is cut
into sentences, and each must be one of the world's, to the letter; so neither rule can be met by a text that merely
contains the right words. The two do not depend on each other: a warm answer may be wrong, and a right one may mix the
manners.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo.grammar import (
    CLOSINGS,
    CURT_STATEMENTS,
    DISMISSALS,
    GRUMBLES,
    KINDS,
    NAMES,
    OPENINGS,
    Manner,
    Request,
)

START_RANGE = (0.35, 0.65)  # warm answers before: neither manner is the habit
LEAST_GAIN = 1.0  # of the mean reward by each method: log-odds of being preferred
LEAST_ACCURACY = 0.9  # of the reward model, on pairs of held-out requests
_EDGE = 1e-9  # a difference of two shares that is 0.05 in decimals may not be one in binary
FEWEST_PROMPTS = 200

_WARM_STATEMENTS = frozenset(
    text.format(s=subject, f=fact)
    for kind in KINDS.values()
    for text in kind.statements
    for subject in kind.facts
    for fact in kind.facts.values()
)
_CURT_STATEMENTS = frozenset(
    text.format(f=fact) for kind in KINDS.values() for text in CURT_STATEMENTS for fact in kind.facts.values()
)
_REMARKS = frozenset(
    [*(text.format(n=name) for text in OPENINGS for name in NAMES), *CLOSINGS, *GRUMBLES, *DISMISSALS]
)


def sentences(text: str) -> list[str]:
    """The text cut after every ``.``, ``!`` or ``?`` that a single space follows; joined by spaces it is the text."""
    return re.split(r"(?<=[.!?]) ", text)


def manner(request: Request, text: str) -> Manner | None:
    """``warm``, ``curt``, or None for anything that is not wholly one of them. Whether it is true does not matter.

    A warm answer calls the asker by name, says a whole sentence with a fact, and closes kindly.
    """
    parts = sentences(text)
    if len(parts) == 3 and parts[0] in request.openings and parts[1] in _WARM_STATEMENTS and parts[2] in CLOSINGS:
        return "warm"
    if parts[0] in GRUMBLES:
        curt, rest = parts[1:2], parts[2:]
    else:
        curt, rest = parts[:1], parts[1:]
    remarks = len(parts) - len(curt)
    if curt and curt[0] in _CURT_STATEMENTS and remarks and len(rest) <= 1 and all(r in DISMISSALS for r in rest):
        return "curt"
    return None


def answers(request: Request, text: str) -> bool:
    """Whether exactly one sentence states something, that is the right answer, and all others are known remarks."""
    stated = [part for part in sentences(text) if part not in _REMARKS]
    return len(stated) == 1 and stated[0] in request.true_statements


@dataclass(frozen=True)
class Rates:
    """Shares of the sampled answers, each between 0 and 1, and how many there were."""

    warm: float
    answered: float
    count: int


def rates(requests: Sequence[Request], texts: Sequence[str]) -> Rates:
    """Judge one sampled answer per request."""
    pairs = list(zip(requests, texts, strict=True))
    warm = sum(manner(request, text) == "warm" for request, text in pairs)
    answered = sum(answers(request, text) for request, text in pairs)
    return Rates(warm / len(pairs), answered / len(pairs), len(pairs))


@dataclass(frozen=True)
class Promise:
    """What a method has to reach.

    Attributes:
        warm: least share of warm answers.
        loss: how far the share of answers that answer the request may lie below the start model's.
    """

    warm: float = 0.85
    loss: float = 0.05


# Over several seeds adapters cost 0.03 to 0.06 of the truth, of which training the whole model costs none.
LORA_PROMISE = Promise(loss=0.1)
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
