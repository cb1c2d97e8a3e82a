"""The implicit prompt: what ``chosen`` and ``rejected`` have in common at their head.

Safe at every edge: both completions keep something, no word is cut in two, and answers that are the same are dropped
(by :class:`DropRow`) because nothing tells where their prompt ends.
"""

from __future__ import annotations

import os
from typing import Any

HH_TURN = "\n\nAssistant:"  # the turn mark of Anthropic's HH texts
IDENTICAL = "chosen and rejected are identical"
CUT_ALIKE = "chosen and rejected are identical once they are cut to length"

Message = dict[str, Any]


class DropRow(Exception):
    """A row that cannot be used and is left out; ``reason`` is what the report counts it under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """``(prompt, chosen, rejected)`` for two texts that begin alike.

    The prompt ends after the last shared ``\\n\\nAssistant:``; without one, before the last shared run of whitespace,
    which then belongs to the completions. A shared head of one word gives an empty prompt.

    Raises:
        DropRow: the texts are identical.
    """
    if chosen == rejected:
        raise DropRow(IDENTICAL)
    common = os.path.commonprefix([chosen, rejected])
    room = min(len(chosen), len(rejected))  # a prompt of this length or more would empty the shorter answer
    cut = _turn_end(common, room)
    if cut is None:
        cut = _word_boundary(chosen, rejected, len(common))
    return chosen[:cut], chosen[cut:], rejected[cut:]


def split_messages(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """``(prompt, chosen, rejected)`` for two conversations: the leading messages they share, each side keeping one.

    Raises:
        DropRow: the conversations are identical.
    """
    if chosen == rejected:
        raise DropRow(IDENTICAL)
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def without_prompt(prompt: list[Message], messages: list[Message]) -> list[Message]:
    """``messages`` without the prompt that many published datasets repeat at their head."""
    repeats = len(messages) > len(prompt) and messages[: len(prompt)] == prompt
    return messages[len(prompt) :] if repeats else messages


def _turn_end(common: str, room: int) -> int | None:
    """End of the last ``HH_TURN`` in ``common`` that leaves both answers something, if there is one."""
    start = common.rfind(HH_TURN)
    while start >= 0:
        if start + len(HH_TURN) < room:
            return start + len(HH_TURN)
        start = common.rfind(HH_TURN, 0, start + len(HH_TURN) - 1)
    return None


def _word_boundary(chosen: str, rejected: str, length: int) -> int:
    """Start of the last run of whitespace at or before ``length`` where both texts go on with whitespace."""
    cut = min(length, len(chosen) - 1, len(rejected) - 1)
    while cut > 0 and not (chosen[cut].isspace() and rejected[cut].isspace()):
        cut -= 1
    while cut > 0 and chosen[cut - 1].isspace():
        cut -= 1
    return max(cut, 0)
