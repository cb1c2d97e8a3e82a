"""Prompts as they stand in a tokenised dataset beside their ids: JSON texts, alike in every dataset of a mixture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, Value

from alignment.data.formats import Prompted, Text
from alignment.data.json_text import json_object, json_text
from alignment.data.storable import finite

STORED = Features({name: Value("string") for name in ("prompt", "template", "columns")})


@dataclass(frozen=True)
class PromptRow:
    """What a scorer is told of a prompt.

    Attributes:
        row: the source row, counted from 0.
        prompt: the canonical prompt, a string or messages.
        template: what goes to the chat template besides the messages, such as ``tools``.
        columns: the user's other columns by name, for reward functions.
    """

    row: int
    prompt: Text
    template: Mapping[str, Any]
    columns: Mapping[str, Any]


def prompt_row(dataset: Dataset, index: int) -> PromptRow:
    """Row ``index`` of a tokenised dataset of prompts."""
    stored = dataset[index]
    prompt, template, columns = (json.loads(stored[name]) for name in STORED)
    return PromptRow(int(stored["row"]), prompt, template, columns)


def stored_prompt(prompted: Prompted, columns: Mapping[str, Any], where: str) -> dict[str, str]:
    """The columns :data:`STORED` of one row.

    Args:
        prompted: the canonical row.
        columns: the user's other columns; their numbers that are not finite become null.
        where: names the row in messages.

    Raises:
        DataError: a value that JSON cannot hold.
    """
    return {
        "prompt": json_text("prompt", prompted.prompt, where),
        "template": json_text("chat_template_kwargs", prompted.template, where),
        "columns": json_object(finite(columns), where),
    }
