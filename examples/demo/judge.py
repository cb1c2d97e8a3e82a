"""The rules that decide, from the text alone, in which manner an answer is and whether it answers the request.

An answer is cut into sentences, and each must be one of the world's, to the letter; so neither rule can be met by a
text that merely contains the right words. The two do not depend on each other: a warm answer may be wrong, and a
right one may mix the manners.
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
