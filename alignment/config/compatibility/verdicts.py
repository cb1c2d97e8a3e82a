"""What is decided about an option of TRL or transformers that has no effect of its own here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import option_fields

Condition = Callable[[Any], bool]


class Verdict(str):
    """The help text of such an option, which also says which of its values ask for what is done here in any case.

    It is a text because a field's metadata are what ``HfArgumentParser`` hands on to ``argparse``.

    Attributes:
        values: those that are accepted; None for all.
        reason: why they change nothing, or why another value is refused.
        instead: what to set in the place of one that is refused.
        condition: of the options, with which any value is accepted; None: none.
    """

    values: tuple[Any, ...] | None
    reason: str
    instead: str
    condition: Condition | None

    def allows(self, options: Any, value: Any) -> bool:
        """Whether the options may have this value."""
        if self.values is None or any(_same(value, one) for one in self.values):
            return True
        return self.condition is not None and self.condition(options)


def _same(one: Any, other: Any) -> bool:
    # False == 0 in Python: the type decides as well, but for numbers.
    numbers = type(one) in (int, float) and type(other) in (int, float)
    return bool(one == other) and (numbers or type(one) is type(other))


def accepted(default: Any, reason: str, *, choices: tuple[str, ...] | None = None) -> Any:
    """A field of which every value is accepted: ``reason`` is a sentence that says why none changes anything.

    Args:
        default: its value where none is given.
        reason: the sentence.
        choices: the values that there are of a text; None: any.
    """
    verdict = Verdict(reason)
    verdict.values, verdict.reason, verdict.instead, verdict.condition = None, reason, "", None
    listed = {} if choices is None else {"choices": choices}
    return dataclasses.field(default=default, metadata={"help": verdict, **listed})


def only(default: Any, *further: Any, reason: str, instead: str, when: Condition | None = None) -> Any:
    """A field of which some values are accepted, those that ask for what is done here.

    Args:
        default: the first of them.
        further: others.
        reason: why the rest is refused.
        instead: what to do.
        when: a condition on the options with which every value is accepted.
    """
    shown = ", ".join("unset" if each is None else str(each).lower() for each in (default, *further) if each != "")
    verdict = Verdict(f"Only {shown or 'unset'}: {reason}; {instead}.")
    verdict.values, verdict.reason, verdict.instead, verdict.condition = (default, *further), reason, instead, when
    return dataclasses.field(default=default, metadata={"help": verdict})


def verdict_of(field: dataclasses.Field[Any]) -> Verdict | None:
    """What is decided about a field; None for an option of this project."""
    text = field.metadata.get("help")
    return text if isinstance(text, Verdict) else None


def refuse_values(options: Any) -> None:
    """Raise :class:`OptionError` for the first value that asks for what is not done here."""
    for field in option_fields(options):
        verdict = verdict_of(field)
        value = getattr(options, field.name)
        if verdict is not None and not verdict.allows(options, value):
            raise OptionError(f"{setting(field.name, value)}: {verdict.reason}; {verdict.instead}")


def judged_names(cls: Any) -> set[str]:
    """The names of the options of a class that have a verdict: they change no number of a run."""
    return {field.name for field in option_fields(cls) if verdict_of(field) is not None}
