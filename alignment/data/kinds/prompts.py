"""Prompts for which the policy generates completions, for Online DPO, with columns for reward functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, Value

from alignment.config.errors import counted
from alignment.data.kinds.base import Kind, Record
from alignment.data.messages import Row, Source, Text, prompt_of, source_of
from alignment.data.readers import json_object, json_text
from alignment.data.tokenization import Encoded, Limits, RowTokenizer
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowPlan

_NO_START = "no tokens to start from (empty prompt, and the tokenizer has no BOS or EOS token)"
_STORED = ("prompt", "template", "columns")  # as JSON, with the same types in every dataset of a mixture


@dataclass(frozen=True)
class PromptBatch(OnDevice):
    """Prompts as token IDs. There is nothing to score yet, so no tensors."""

    rows: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PromptRow:
    """A prompt with the data that reward functions and models need.

    Attributes:
        row: the source row, counted from 0.
        prompt: the prompt as text: a string or messages.
        template: variables for the chat template, such as ``tools``.
        columns: the user's other columns by name, for reward functions.
    """

    row: int
    prompt: Text
    template: Mapping[str, Any]
    columns: Mapping[str, Any]


class Prompts(Kind):
    """A prompt. Other columns are stored with it, and never make a dataset invalid."""

    name = "prompt_only"
    formats = (("prompt",),)
    further = {name: Value("string") for name in _STORED}
    keeps_columns = True

    def parse(self, row: Row, where: str, others: Row) -> Source:
        source = source_of(row, where, prompt_of(row, where))
        stored = {
            "prompt": json_text("prompt", source.prompt, where),
            "template": json_text("chat_template_kwargs", source.template, where),
            "columns": json_object(others, where),
        }
        return replace(source, further=stored)

    def records(self, row: Encoded, limits: Limits, tokenizer: RowTokenizer) -> list[Record]:
        """Return one record. A prompt is never truncated: one that is too long is dropped."""
        (record,) = super().records(row, Limits(), tokenizer)
        most = limits.max_prompt_length
        if not row.prompt:
            return [record | {"dropped": _NO_START}]
        if most is not None and len(row.prompt) > most:
            return [record | {"prompt_ids": [], "dropped": f"prompt longer than {counted(most, 'token')}"}]
        return [record]

    def collate(self, dataset: Dataset, plan: WindowPlan, micro: int, rank: int) -> PromptBatch:
        own = plan.micro_batches[micro][rank]
        prompts = dataset[list(own.rows)]["prompt_ids"] if own.rows else []
        return PromptBatch(own.rows, tuple(map(tuple, prompts)))


PROMPTS = Prompts()


def prompt_row(dataset: Dataset, index: int) -> PromptRow:
    """Read row ``index`` of a tokenized dataset of prompts."""
    stored = dataset[index]
    prompt, template, columns = (json.loads(stored[name]) for name in _STORED)
    return PromptRow(int(stored["row"]), prompt, template, columns)
