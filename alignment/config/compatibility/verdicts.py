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
        reason: why they have no effect, or why other values are rejected.
        instead: what to set instead of a rejected value.
        condition: a predicate on the options; if true, every value is accepted. None for no such predicate.
    """

    values: tuple[Any, ...] | None
    reason: str
    instead: str
    condition: Condition | None

    def allows(self, options: Any, value: Any) -> bool:
        """Whether the value is accepted with these options."""
        if self.values is None or any(_same(value, one) for one in self.values):
            return True
        return self.condition is not None and self.condition(options)


def _same(one: Any, other: Any) -> bool:
    # False == 0 in Python: compare the types as well, except for numbers.
    numbers = type(one) in (int, float) and type(other) in (int, float)
    return bool(one == other) and (numbers or type(one) is type(other))


def accepted(default: Any, reason: str) -> Any:
    """Declare a field whose values are all accepted and have no effect.

    Args:
        default: default value.
        reason: a sentence that says why it has no effect.
    """
    verdict = Verdict(reason)
    verdict.values, verdict.reason, verdict.instead, verdict.condition = None, reason, "", None
    return dataclasses.field(default=default, metadata={"help": verdict})


def only(default: Any, *further: Any, reason: str, instead: str, when: Condition | None = None) -> Any:
    """Declare a field of which only the values are accepted that match the behavior here.

    Args:
        default: the default, which is accepted.
        further: further accepted values.
        reason: why other values are rejected.
        instead: what to set instead.
        when: a predicate on the options; if true, every value is accepted.
    """
    shown = " or ".join("unset" if each is None else str(each).lower() for each in (default, *further) if each != "")
    verdict = Verdict(f"Must be {shown or 'unset'}: {reason}; {instead}.")
    verdict.values, verdict.reason, verdict.instead, verdict.condition = (default, *further), reason, instead, when
    return dataclasses.field(default=default, metadata={"help": verdict})


def verdict_of(field: dataclasses.Field[Any]) -> Verdict | None:
    """Return the verdict of a field, or None for an option of this project."""
    text = field.metadata.get("help")
    return text if isinstance(text, Verdict) else None


def refuse_values(options: Any) -> None:
    """Raise :class:`OptionError` for the first value that is not accepted."""
    for field in option_fields(options):
        verdict = verdict_of(field)
        value = getattr(options, field.name)
        if verdict is not None and not verdict.allows(options, value):
            raise OptionError(f"{setting(field.name, value)}: {verdict.reason}; {verdict.instead}")


def judged_names(cls: Any) -> set[str]:
    """Return the names of the options of a class that have a verdict, and so no effect on results."""
    return {field.name for field in option_fields(cls) if verdict_of(field) is not None}
