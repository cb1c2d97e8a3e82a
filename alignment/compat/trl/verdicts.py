"""Declarations of options of TRL and transformers that have no effect, or whose values are restricted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import option_fields

Condition = Callable[[Any], bool]


class Verdict(str):
    """The help text of such an option, together with the values that are accepted.

    It is a string because ``HfArgumentParser`` passes a field's metadata on to ``argparse``.

    Attributes:
        values: accepted values; None for all.
        reason: why they have no effect, or why other values are rejected and what to set instead.
        condition: a predicate on the options; if true, every value is accepted.
    """

    values: tuple[Any, ...] | None
    reason: str
    condition: Condition | None


def accepted(default: Any, reason: str) -> Any:
    """Declare a field whose values are all accepted and have no effect, for this reason."""
    return _field(default, reason, None, reason, None)


def only(default: Any, reason: str, *further: Any, when: Condition | None = None) -> Any:
    """Declare a field that accepts only the default and ``further`` values, or every value if ``when(options)``.

    ``reason`` says why other values are rejected, and what to set instead.
    """
    values = (default, *further)
    shown = " or ".join("unset" if each is None else str(each).lower() for each in values if each != "")
    return _field(default, f"Must be {shown or 'unset'}: {reason}.", values, reason, when)


def _field(default: Any, text: str, values: tuple[Any, ...] | None, reason: str, condition: Condition | None) -> Any:
    verdict = Verdict(text)
    verdict.values, verdict.reason, verdict.condition = values, reason, condition
    return dataclasses.field(default=default, metadata={"help": verdict})


def verdict_of(field: dataclasses.Field[Any]) -> Verdict | None:
    """Return the verdict of a field, or None for an option of this project."""
    text = field.metadata.get("help")
    return text if isinstance(text, Verdict) else None


def refuse_values(options: Any) -> None:
    """Raise :class:`OptionError` for the first value that is not accepted."""
    for field in option_fields(options):
        verdict, value = verdict_of(field), getattr(options, field.name)
        if verdict is None or verdict.values is None or any(value == each for each in verdict.values):
            continue
        if verdict.condition is None or not verdict.condition(options):
            raise OptionError(f"{setting(field.name, value)}: {verdict.reason}")


def judged_names(cls: Any) -> set[str]:
    """Return the names of the options of a class that have a verdict, and so no effect on results."""
    return {field.name for field in option_fields(cls) if verdict_of(field) is not None}
