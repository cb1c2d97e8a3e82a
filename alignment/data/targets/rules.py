"""Options that select the tokens in the loss, and the conversion of a masked sequence to prompt and completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowRules:
    """How rows of ``prompt_completion`` are read. Other kinds use the defaults.

    Attributes:
        completion_only: whether the loss covers the completion only (True) or all tokens (False). None: the completion
            of rows with prompt and completion, all tokens of a conversation or a text.
        assistant_only: restrict the loss further, to the assistant's messages.
        text_field: name of the text column.
        tokenized: whether rows must already be tokenized.
    """

    completion_only: bool | None = None
    assistant_only: bool = False
    text_field: str = "text"
    tokenized: bool = False


USUAL = RowRules()


@dataclass(frozen=True)
class Learned:
    """A sequence split before its first token in the loss.

    Attributes:
        prompt: the tokens before the split, at least one.
        completion: the remaining tokens; empty if no token is in the loss.
        scored: loss mask of the completion; None if all its tokens are in the loss.
        first: whether the sequence's first token has a label, although it cannot be predicted; only for display.
    """

    prompt: list[int]
    completion: list[int]
    scored: list[bool] | None = None
    first: bool = False


def divided(ids: Sequence[int], learned: Sequence[bool]) -> Learned:
    """Split a sequence into prompt and completion. Its first token is always context.

    Args:
        ids: (T,) token IDs.
        learned: (T,) loss mask.
    """
    border = next((place for place in range(1, len(ids)) if learned[place]), len(ids))
    scored = [bool(value) for value in learned[border:]]
    first = bool(learned) and bool(learned[0])
    return Learned(list(ids[:border]), list(ids[border:]), None if all(scored) else scored, first)
