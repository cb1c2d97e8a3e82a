"""The policy's completions with the rows that they answer, and the form in which rewards and judges see them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment.data.batching import TokenIds
from alignment.data.json_columns import PromptRow, prompt_row
from alignment.engines.rollout.backend import Completion
from alignment.engines.rollout.texts import continuations
from alignment.rewards.samples import Samples, spoken
from alignment.training.data import PreparedData


@dataclass(frozen=True)
class Generated:
    """One prompt and what the policy made of it.

    Attributes:
        row: of the tokenised dataset.
        source: its prompt and further columns as the user gave them.
        place: names the row in messages.
        prompt: the token ids that the completions continue.
        completions: as they were generated.
        texts: the same decoded, without special tokens.
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
    """Completions, decoded, beside the rows that they are of; the sequences are equally long."""
    found = []
    for row, prompt, group in zip(rows, prompts, completions, strict=True):
        source = prompt_row(data.dataset, row)
        # A message stands alone; a text goes on, and many tokenizers drop the space that a text would begin with.
        before = list(prompt) if isinstance(source.prompt, str) else []
        texts = continuations(before, [list(completion.ids) for completion in group], tokenizer)
        found.append(Generated(row, source, data.place(row), tuple(prompt), tuple(group), tuple(texts)))
    return found


def further_columns(data: PreparedData) -> list[str]:
    """The names of the columns that rows have beside the prompt's; of a mixture, those of every part."""
    starts = itertools.accumulate((part.report.rows_out for part in data.parts[:-1]), initial=0)
    return list(dict.fromkeys(name for row in starts for name in prompt_row(data.dataset, row).columns))


def samples_of(groups: Sequence[Generated], columns: Sequence[str]) -> Samples:
    """Every completion as a sample, prompt after prompt, with these columns; one that a row lacks is None there."""
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
