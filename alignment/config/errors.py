"""User errors, and the formatting of values in their messages.

Every message is a single line that names the file, row, key and value, and what to set instead. The command line
prints it without a traceback. Any other exception is a bug of this project.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any, NoReturn

SECRETS = frozenset({"hub_token", "push_to_hub_token", "token", "use_auth_token", "api_key"})
_LONGEST = 60
_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}


class AlignmentError(ValueError):
    """Base class of all user errors. The message is the complete explanation."""


class OptionError(AlignmentError):
    """An invalid option, or an invalid combination of options."""


class DataError(AlignmentError):
    """An invalid data file, row or column."""


class LabelError(DataError):
    """A label that is neither true nor false."""


class ModelError(AlignmentError):
    """An invalid or unsupported model, tokenizer or model folder."""


class OutputError(AlignmentError):
    """A folder or file that cannot be written."""


class LastCheckpointError(OutputError):
    """Training has finished, but its last checkpoint could not be written."""


class CheckpointError(AlignmentError):
    """A checkpoint that cannot be written, read or resumed from."""


class TrainingError(AlignmentError):
    """A run that had to stop: the loss is not finite, or a step is not possible."""


class RewardError(AlignmentError):
    """A reward function or judge that raised an exception or returned an invalid result."""


class HubError(AlignmentError):
    """An upload that failed."""


class Leaving(SystemExit):
    """Raised to end this process; not a failure of the code that it interrupts."""


def without_secrets(name: str, value: Any) -> Any:
    """Replace secrets by their names, also within mappings such as ``model_init_kwargs``."""
    if name in SECRETS and value is not None and not isinstance(value, bool):
        return f"<{name.upper()}>"
    return {key: without_secrets(key, each) for key, each in value.items()} if isinstance(value, dict) else value


def is_placeholder(name: str, value: Any) -> bool:
    """Whether a value is what :func:`without_secrets` writes, as in ``options.json`` used as a recipe."""
    return name in SECRETS and value == f"<{name.upper()}>"


def setting(name: str, value: Any) -> str:
    """Format ``name=value`` for a message: on one line, shortened, and without secrets."""
    shown = without_secrets(name, value.value if isinstance(value, Enum) else value)
    text = "<hidden>" if name in SECRETS else repr(shown)
    name = name if len(name) <= 100 else name[:97] + "…"
    return f"{name}={text if len(text) <= 100 else text[:97] + '…'}"


def refuse(options: Any, names: str, why: str) -> NoReturn:
    """Raise :class:`OptionError` for the values of options, named in a text of one or several words."""
    raise OptionError(f"{' and '.join(setting(name, getattr(options, name)) for name in names.split())}: {why}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if one of the names is close, otherwise an empty string."""
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def type_name(value: object) -> str:
    """Return the type of ``value`` in words, such as ``a boolean``, or its class name if it is not a JSON type."""
    return "null" if value is None else _TYPES.get(type(value), f"of type {type(value).__name__}")


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1: ``1 rank``, ``4 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show(value: object) -> str:
    """Format ``value`` and its type for an error message, on one short line: ``'yes' (a string)``."""
    if value is None:
        return "null"
    text = "true" if value is True else "false" if value is False else repr(value).replace("\n", " ")
    return f"{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'} ({type_name(value)})"


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` as one line, or its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def listing(names: Any) -> str:
    """Format names for an error message: ``a, b, c``, or ``none``."""
    return ", ".join(str(name) for name in names) or "none"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, joined with the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
