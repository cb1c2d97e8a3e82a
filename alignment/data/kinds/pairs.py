"""Pairs of a chosen and a rejected completion, for CPO and DPO, with or without a prompt."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from alignment.config.errors import DataError
from alignment.data import messages
from alignment.data.batching import Batch, TokenIds, collate
from alignment.data.kinds.base import Kind
from alignment.data.messages import Message, Row, Source, Text
from alignment.data.targets import TokenFormat
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowPlan

HH_TURN = "\n\nAssistant:"  # the turn marker of Anthropic's HH dataset


@dataclass(frozen=True)
class PreferenceBatch(OnDevice):
    """Pairs: ``pairs`` has 2P sequences, the chosen completions first; ``margins`` is (P,) fp32 or None."""

    rows: tuple[int, ...]
    pairs: Batch
    margins: Tensor | None = None


class Pairs(Kind):
    """A chosen and a rejected completion."""

    name = "preference"
    formats = (("chosen", "rejected"),)
    completions = ("chosen_ids", "rejected_ids")
    tokens = TokenFormat(("prompt_ids", "chosen_ids", "rejected_ids"))

    def parse(self, row: Row, where: str, others: Row) -> Source:
        """Convert a row. Without a prompt column, the prompt is the common prefix of both completions."""
        for key in ("chosen", "rejected"):
            if row.get(key) is None:
                raise DataError(f"{where}: {key} is missing; every row must have chosen and rejected")
        chosen, rejected = (messages.text_of(row, key, where, answer=True) for key in ("chosen", "rejected"))
        if isinstance(chosen, str) is not isinstance(rejected, str):
            raise messages.different_forms(where, chosen=chosen, rejected=rejected)
        prompt = messages.prompt_of(row, where)
        if prompt is None:
            split: Any = split_texts if isinstance(chosen, str) else split_messages
            prompt, chosen, rejected = split(chosen, rejected)
        elif isinstance(prompt, str) and not isinstance(chosen, str):
            prompt, chosen, rejected = _spoken_prompt(prompt, chosen, rejected)
        return messages.source_of(row, where, prompt, chosen=chosen, rejected=rejected)

    def collate(self, dataset: Dataset, plan: WindowPlan, micro: int, rank: int) -> PreferenceBatch:
        own = plan.micro_batches[micro][rank]
        data = dataset[list(own.rows)]
        pairs = list(zip(data["prompt_ids"], data["chosen_ids"], data["rejected_ids"]))
        margins = torch.tensor(data["margin"], dtype=torch.float32) if "margin" in self.further else None
        return replace(collate_pairs(own.rows, pairs, plan.longest[micro]), margins=margins)


PAIRS = Pairs()


def collate_pairs(
    rows: tuple[int, ...], pairs: Sequence[tuple[TokenIds, TokenIds, TokenIds]], longest: int
) -> PreferenceBatch:
    """Collate P pairs of prompt, first and second completion; P may be 0. For ``longest`` see :class:`Batch`."""
    firsts = [(prompt, first) for prompt, first, _ in pairs]
    seconds = [(prompt, second) for prompt, _, second in pairs]
    count = len(pairs)
    groups = [(number, count + number) for number in range(count)]
    return PreferenceBatch(rows, collate(firsts + seconds, longest, groups=groups))


def _spoken_prompt(prompt: str, chosen: Any, rejected: Any) -> tuple[Text, Text, Text]:
    """Handle a string prompt with conversational completions: it is a user message in both or precedes both."""
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}], chosen, rejected
    shared, better, worse = split_messages(chosen, rejected)
    asked = [message["content"] for message in shared if message["role"] == "user"]
    if prompt.strip() in [str(content).strip() for content in asked]:
        return shared, better, worse
    return prompt, chosen, rejected


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts with a common prefix into ``(prompt, chosen, rejected)``. Neither completion becomes empty.

    The prompt ends after the last common ``\\n\\nAssistant:``; without one, before the last common whitespace, which
    then belongs to the completions, so that no word is split. A common prefix of one word gives an empty prompt.
    """
    common, room = os.path.commonprefix([chosen, rejected]), min(len(chosen), len(rejected))
    # A prompt as long as the shorter text would leave its completion empty.
    turns = [turn.end() for turn in re.finditer(HH_TURN, common) if turn.end() < room]
    cut = turns[-1] if turns else max(0, min(len(common), room - 1))
    if not turns:
        while cut > 0 and not (chosen[cut].isspace() and rejected[cut].isspace()):
            cut -= 1
        cut = len(chosen[:cut].rstrip())
    return chosen[:cut], chosen[cut:], rejected[cut:]


def split_messages(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split two conversations into ``(prompt, chosen, rejected)``. The prompt is their common leading messages.

    At least one message is left in each completion.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]
