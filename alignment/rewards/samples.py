"""Samples, completions with the data of their rows, and the interface of reward sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from alignment.data.messages import Text


@dataclass(frozen=True)
class Samples:
    """The S completions of one rank, possibly none. A prompt with two completions is two samples.

    Attributes:
        prompts: (S,) the user's strings or lists of messages.
        completions: (S,) a string, or a list with one assistant message for a conversational prompt; only the
            generated text, also if it continues the prompt's last message.
        completion_ids: (S,) generated token IDs, including the token that ended the completion.
        ended: (S,) whether the completion ended with an end token rather than at ``max_new_tokens``.
        columns: additional columns of the dataset by name, each with S values.
        places: (S,) names of the samples' rows in messages, such as ``data.jsonl, row 12``.
        template: (S,) variables for the chat template, such as ``tools``.
    """

    prompts: list[Text]
    completions: list[Text]
    completion_ids: list[list[int]]
    ended: list[bool]
    columns: dict[str, list[Any]]
    places: list[str]
    template: list[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.prompts)


class RewardSource(Protocol):
    """Scores samples. Sources other than functions may run collectives, so all ranks must make the same calls."""

    name: str  # in messages and metrics
    truncated: int  # samples that were too long and truncated in the last call

    def score(self, samples: Samples) -> list[float | None]:
        """Return one finite score per sample, or None for no score."""
        ...

    def close(self) -> None:
        """Release the source's resources."""
        ...


def spoken(prompt: Text, text: str) -> Text:
    """Return a completion in the form of its prompt: the text itself, or a list with one assistant message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def continues(prompt: Text) -> bool:
    """Whether a completion of the prompt continues its text, or its last message if that is the assistant's."""
    if isinstance(prompt, str):
        return True
    return bool(prompt) and prompt[-1]["role"] == "assistant" and prompt[-1]["content"] is not None


def one_turn(prompt: Text, completion: Text) -> tuple[Text, Text]:
    """Move an assistant message that the completion continues from the prompt to the start of the completion."""
    if isinstance(prompt, str) or isinstance(completion, str) or not continues(prompt):
        return prompt, completion
    text = prompt[-1]["content"] + completion[0]["content"]
    return prompt[:-1], [{**prompt[-1], "content": text}]


def in_groups(values: Sequence[Any], size: int) -> list[list[Any]]:
    """Group values per sample into values per prompt, ``size`` samples for each prompt."""
    return [list(values[start : start + size]) for start in range(0, len(values), size)]
