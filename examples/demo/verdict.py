"""The rules that judge a response, the demo's targets, and which of them a run has not met.

The rules use only the text to decide the style of a response and whether it is correct. A response is split into
sentences, and each must match one of the world's exactly, so a text that merely contains the right words satisfies
neither rule. The two rules are independent: a warm response may be wrong, and a correct one may mix the styles.
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

START_RANGE = (0.35, 0.65)  # share of warm responses before alignment: neither style dominates
LEAST_GAIN = 1.0  # minimum increase of the mean reward, in log-odds of being preferred
LEAST_ACCURACY = 0.9  # minimum accuracy of the reward model on held-out pairs
_EDGE = 1e-9  # rounding: a difference of 0.05 may not be exact in binary
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
    """Split the text after every ``.``, ``!`` or ``?`` followed by a single space; joining by spaces reverses it."""
    return re.split(r"(?<=[.!?]) ", text)


def manner(request: Request, text: str) -> Manner | None:
    """Return ``warm``, ``curt``, or None if the text is not entirely one of them, whether it is true or not.

    A warm response addresses the user by name, states a fact in a whole sentence, and ends with a kind closing.
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
    """Whether exactly one sentence makes a statement, it is correct, and all others are known remarks."""
    stated = [part for part in sentences(text) if part not in _REMARKS]
    return len(stated) == 1 and stated[0] in request.true_statements


@dataclass(frozen=True)
class Rates:
    """Shares of the sampled responses, between 0 and 1, and their number."""

    warm: float
    answered: float
    count: int


def rates(requests: Sequence[Request], texts: Sequence[str]) -> Rates:
    """Judge one sampled response per request."""
    pairs = list(zip(requests, texts, strict=True))
    warm = sum(manner(request, text) == "warm" for request, text in pairs)
    answered = sum(answers(request, text) for request, text in pairs)
    return Rates(warm / len(pairs), answered / len(pairs), len(pairs))


@dataclass(frozen=True)
class Targets:
    """The targets of a method.

    Attributes:
        warm: minimum share of warm responses.
        loss: how far the share of correct responses may fall below the initial model's.
    """

    warm: float = 0.85
    loss: float = 0.05


# Over several seeds, adapters lose 0.03 to 0.06 of the correct responses, full fine-tuning none.
LORA_TARGETS = Targets(loss=0.1)
# Its reward model has learned style, not correctness, so only the reference preserves correctness.
ONLINE_TARGETS = Targets(warm=0.75, loss=0.1)


@dataclass(frozen=True)
class Measured:
    """One row of the table: a model by its title, and the results for its sampled responses.

    Attributes:
        title: title of the row.
        rates: results of the rules.
        reward: mean score of the responses by the reward model.
        seconds: training time.
        targets: what it has to reach.
    """

    title: str
    rates: Rates
    reward: float
    seconds: float
    targets: Targets = Targets()


def missed(start: Measured, trained: Sequence[Measured], accuracy: float) -> list[str]:
    """Return each target that is not met, as a clause with its value; empty if all are met.

    Args:
        start: the initial model.
        trained: all models trained from it.
        accuracy: share of held-out pairs that the reward model ranks correctly.
    """
    low, high = START_RANGE
    faults = []
    if start.rates.count < FEWEST_PROMPTS:
        faults.append(f"{start.rates.count} held-out prompts, expected at least {FEWEST_PROMPTS}")
    if not low <= start.rates.warm <= high:
        faults.append(f"{start.title}: preferred style {start.rates.warm:.3f}, expected {low} to {high}")
    if accuracy < LEAST_ACCURACY:
        faults.append(f"reward model: accuracy {accuracy:.3f} on held-out pairs, expected at least {LEAST_ACCURACY}")
    reward = start.reward + LEAST_GAIN
    for model in trained:
        targets = model.targets
        least = start.rates.answered - targets.loss
        if model.rates.warm < targets.warm:
            faults.append(f"{model.title}: preferred style {model.rates.warm:.3f}, expected at least {targets.warm}")
        if not model.reward >= reward - _EDGE:  # written this way, NaN fails too
            faults.append(
                f"{model.title}: mean reward {model.reward:.2f}, expected at least {reward:.2f} "
                f"({LEAST_GAIN} above {start.title})"
            )
        if model.rates.answered < least - _EDGE:
            faults.append(
                f"{model.title}: correct {model.rates.answered:.3f}, expected at least {least:.3f} "
                f"({targets.loss} below {start.title})"
            )
    return faults
