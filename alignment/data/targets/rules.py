"""The conversion of a sequence with a loss mask to prompt and completion."""

from __future__ import annotations

from collections.abc import Sequence

from alignment.data.tokenization import Encoded


def divided(ids: Sequence[int], learned: Sequence[bool]) -> Encoded:
    """Divide a sequence before its first token in the loss into a prompt, of at least one token, and a completion.

    The result's ``further`` has ``scored``, the loss mask of the completion (None if all its tokens are in the loss;
    the completion is empty if no token is), and ``first``: whether the sequence's first token has a label, although
    it cannot be predicted; only for display.

    Args:
        ids: (T,) token IDs.
        learned: (T,) loss mask.
    """
    border = next((place for place in range(1, len(ids)) if learned[place]), len(ids))
    scored = [bool(value) for value in learned[border:]]
    further = {"scored": None if all(scored) else scored, "first": bool(learned) and bool(learned[0])}
    return Encoded(list(ids[:border]), [list(ids[border:])], further)
