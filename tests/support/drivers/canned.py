"""Completions and scores that are pure functions of the prompt, so that a test knows the pairs of every window.

Prompts are those of ``char_tokenizer``. Prompts that begin with a digit are special: see :class:`Kind`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import IntEnum

EOS, LETTER_A, DIGIT_0 = 1, 3, 55
LONGEST = 20


class Kind(IntEnum):
    """The relation between the completions of a prompt, by its first digit."""

    IDENTICAL = 0  # all have the same text
    TIED = 1  # different texts, one score
    UNSCORED = 2  # none has a score
    SOME_UNSCORED = 3  # those that begin with a to m have none
    ENDED_APART = 4  # all have the same text, every second one with EOS


def completion(prompt: Sequence[int], number: int, count: int) -> tuple[int, ...]:
    """Return the ids of completion ``number`` of ``count``: 1 to 20 lower-case letters, with or without EOS."""
    kind = prompt[0] - DIGIT_0
    one_text = kind in (Kind.IDENTICAL, Kind.ENDED_APART)
    rng = random.Random(repr((list(prompt), None if one_text else (number, count))))
    ids = [rng.randrange(LETTER_A, LETTER_A + 26) for _ in range(rng.randint(1, LONGEST))]
    ends = number % 2 == 0 if kind == Kind.ENDED_APART else rng.random() < 0.5
    return (*ids, EOS) if ends else tuple(ids)


def written(ids: Sequence[int]) -> str:
    """Return the text of a completion."""
    return "".join(chr(ord("a") + token - LETTER_A) for token in ids if token != EOS)


def score(prompt: str, text: str) -> float | None:
    """Return the score of a completion in :func:`reward`, or None."""
    kind = int(prompt[0]) if prompt[0].isdigit() else -1
    if kind == Kind.UNSCORED or (kind == Kind.SOME_UNSCORED and text[0] < "n"):
        return None
    return 1.25 if kind == Kind.TIED else sum(place * ord(letter) for place, letter in enumerate(text, 1)) % 31 / 8 - 2


def reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
    """The reward function of the runs."""
    return [score(prompt, text) for prompt, text in zip(prompts, completions)]


def judge(prompts: Sequence[str], pairs: Sequence[Sequence[str]]) -> list[int]:
    """A judge that prefers higher values of :func:`score`, and gives no verdict on ties and missing scores."""
    verdicts = []
    for prompt, (first, second) in zip(prompts, pairs):
        one, other = score(prompt, first), score(prompt, second)
        verdicts.append(-1 if one is None or other is None or one == other else int(other > one))
    return verdicts
