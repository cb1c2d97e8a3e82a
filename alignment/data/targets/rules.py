"""What options say of the tokens to learn, and how a sequence with a mask becomes prompt and completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowRules:
    """How rows of ``prompt_completion`` are read; the defaults leave other kinds as they are.

    Attributes:
        completion_only: learn the answer alone (True) or every token of the row (False). None: the answer of rows
            with prompt and completion, every token of a conversation or a text.
        assistant_only: of these, learn what the assistant says in any of its turns.
        text_field: the column that holds a text.
        tokenised: rows have to be token ids already.
    """

    completion_only: bool | None = None
    assistant_only: bool = False
    text_field: str = "text"
    tokenised: bool = False


USUAL = RowRules()


@dataclass(frozen=True)
class Learned:
    """A sequence cut before its first token that is learned.

    Attributes:
        prompt: the tokens before it; one at least, from which the first one is predicted.
        completion: all others; empty where there is nothing to learn.
        scored: for each of the completion's tokens whether it is learned; None where all are.
        first: whether the very first token was to be learned as well, which nothing predicts; for who looks at rows.
    """

    prompt: list[int]
    completion: list[int]
    scored: list[bool] | None = None
    first: bool = False


def divided(ids: Sequence[int], learned: Sequence[bool]) -> Learned:
    """A whole sequence as prompt and completion; its first token is context, as nothing stands before it.

    Args:
        ids: (T,) token ids.
        learned: (T,) which of them are to be learned.
    """
    border = next((place for place in range(1, len(ids)) if learned[place]), len(ids))
    scored = [bool(value) for value in learned[border:]]
    first = bool(learned) and bool(learned[0])
    return Learned(list(ids[:border]), list(ids[border:]), None if all(scored) else scored, first)
