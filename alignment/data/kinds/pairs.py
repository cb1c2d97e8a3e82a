"""Pairs of a chosen and a rejected completion, with or without a prompt; for reward models also with a margin."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from torch import Tensor

from alignment.config.errors import DataError, show
from alignment.data import messages
from alignment.data.batching import Batch, OnDevice, TokenIds, collate
from alignment.data.kinds.base import Kind
from alignment.data.messages import Message, Row, Source, Text
from alignment.data.targets import TokenColumns, TokenFormat
from alignment.data.tokenization import Encoded, RowTokenizer
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
    return PreferenceBatch(rows, collate(firsts + seconds, longest))


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


_LARGEST = float(np.finfo(np.float32).max)


class ScoredPairs(Pairs):
    """A pair with a margin. Sequences are scored at their last token, so none needs context before its completion."""

    name = "preference_margin"
    optional = ("margin", *Pairs.optional)
    further = {"margin": Value("float32")}
    tokens = TokenFormat(("chosen_ids", "rejected_ids"), ("margin",), whole=True)
    whole = True

    def parse(self, row: Row, where: str, others: Row) -> Source:
        return replace(super().parse(row, where, others), further={"margin": margin_of(row, where)})

    def read_tokens(self, row: Row, columns: TokenColumns, where: str, tokenizer: RowTokenizer) -> Encoded:
        return replace(super().read_tokens(row, columns, where, tokenizer), further={"margin": margin_of(row, where)})


SCORED_PAIRS = ScoredPairs()


def margin_of(row: Row, where: str) -> float:
    """Return the margin of a pair: column ``margin``, or 0 if it is null, empty or missing.

    A string is parsed as a number, because CSV files only have strings. A list with one number, the format of TRL up
    to 0.23, is also accepted.

    Raises:
        DataError: the margin is not a finite number that fits in 32 bits.
    """
    given = row.get("margin")
    value = given[0] if isinstance(given, list) and len(given) == 1 else given
    if value is None or (isinstance(value, str) and not value.strip()):
        return 0.0
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and abs(float(value)) <= _LARGEST:
            return float(value)
    raise DataError(f"{where}: margin is {show(value)}; expected a finite number or null")
