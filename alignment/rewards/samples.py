"""What is scored, and what scores: completions with all that is known of their rows, and the interface of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from alignment.data.messages import Text


@dataclass(frozen=True)
class Samples:
    """The completions of one rank, S of them; a prompt with two completions is two samples. It may be empty.

    Attributes:
        prompts: (S,) strings or lists of messages, as the user gave them.
        completions: (S,) a string, or for a conversational prompt one assistant's message in a list.
        completion_ids: (S,) token ids as they were generated, with the token that ended the completion.
        ended: (S,) whether the completion ended by itself, not at ``max_new_tokens``.
        columns: further columns of the dataset by name, each with S values.
        places: (S,) names of the samples' rows for messages, such as ``data.jsonl row 12``.
        template: (S,) variables of the chat template besides the messages, such as ``tools``.
    """

    prompts: list[Text]
    completions: list[Text]
    completion_ids: list[list[int]]
    ended: list[bool]
    columns: dict[str, list[Any]]
    places: list[str]
    template: list[Mapping[str, Any]]

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "columns"}
        sizes = {name: len(values) for name, values in {**self.columns, **given}.items()}
        assert set(sizes.values()) == {len(self)}, f"of unequal length: {sizes}"

    def __len__(self) -> int:
        return len(self.prompts)


class RewardSource(Protocol):
    """Scores samples. One that is no user's function may call collectives, so every rank calls it equally often.

    Attributes:
        name: for messages and metrics.
        truncated: how many of the samples last scored were cut because they were too long for the source.
    """

    name: str
    truncated: int

    def score(self, samples: Samples) -> list[float | None]:
        """One finite score per sample; None where the source has nothing to say of it."""
        ...

    def close(self) -> None:
        """Release what the source holds."""
        ...


def spoken(prompt: Text, text: str) -> Text:
    """A completion's text in the form of its prompt: the text itself, or one assistant's message in a list."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def in_groups(values: Sequence[Any], size: int) -> list[list[Any]]:
    """Values per sample as values per prompt, ``size`` samples to each prompt."""
    return [list(values[start : start + size]) for start in range(0, len(values), size)]
