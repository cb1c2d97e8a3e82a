"""Completions with their dataset rows, and the samples that rewards and judges receive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment.data.batching import TokenIds
from alignment.data.kinds.prompts import PromptRow, prompt_row
from alignment.rewards.samples import Samples, continues, spoken
from alignment.rollout.backend import Completion, continuations
from alignment.training.data import PreparedData


@dataclass(frozen=True)
class Generated:
    """A prompt with the policy's completions.

    Attributes:
        row: index in the tokenized dataset.
        source: the prompt and further columns as in the user's data.
        place: the row's name in messages.
        prompt: token ids of the prompt.
        completions: token ids as generated.
        texts: decoded completions, without special tokens.
    """

    row: int
    source: PromptRow
    place: str
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]


def described(
    rows: Sequence[int],
    prompts: Sequence[TokenIds],
    completions: Sequence[Sequence[Completion]],
    data: PreparedData,
    tokenizer: Any,
) -> list[Generated]:
    """Decode completions and attach their dataset rows; all sequences have the same length."""
    found = []
    for row, prompt, group in zip(rows, prompts, completions, strict=True):
        source = prompt_row(data.dataset, row)
        # A chat message is decoded alone. A continuation of text or of a message is decoded with its prompt, as many
        # tokenizers drop its leading space.
        before = list(prompt) if continues(source.prompt) else []
        texts = continuations(before, [list(completion.ids) for completion in group], tokenizer)
        found.append(Generated(row, source, data.place(row), tuple(prompt), tuple(group), tuple(texts)))
    return found


def further_columns(data: PreparedData) -> list[str]:
    """Return the names of the columns other than the prompt; for a mixture, those of all parts."""
    starts = itertools.accumulate((part.report.rows_out for part in data.parts[:-1]), initial=0)
    return list(dict.fromkeys(name for row in starts for name in prompt_row(data.dataset, row).columns))


def samples_of(groups: Sequence[Generated], columns: Sequence[str]) -> Samples:
    """Return each completion as a sample, prompt by prompt, with these columns; a missing column is None."""
    each = [(group, number) for group in groups for number in range(len(group.completions))]
    return Samples(
        prompts=[group.source.prompt for group, _ in each],
        completions=[spoken(group.source.prompt, group.texts[number]) for group, number in each],
        completion_ids=[list(group.completions[number].ids) for group, number in each],
        ended=[group.completions[number].ended for group, number in each],
        columns={name: [group.source.columns.get(name) for group, _ in each] for name in columns},
        places=[group.place for group, _ in each],
        template=[group.source.template for group, _ in each],
    )
