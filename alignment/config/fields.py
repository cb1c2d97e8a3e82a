"""How an option is declared: one helper that keeps its help text and choices beside it, and the strategy values."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any


class Strategy(str, Enum):
    """When something happens during training.

    The names and values are those of transformers' ``IntervalStrategy``, and members of the two compare equal, so
    that transformers' callbacks read it as their own without this floor importing transformers.
    """

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"

    def __str__(self) -> str:
        return self.value


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field with its one-sentence help and, for text options, the values that it may take."""
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = choices
    return dataclasses.field(default=default, metadata=metadata)


def words(text: str) -> tuple[str, ...]:
    """The words of a text: a long list of names that stays readable."""
    return tuple(text.split())
