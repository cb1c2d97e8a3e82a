"""The errors that a user can fix, and how values are worded in their messages.

Every message is one line that names the file, row, key and value at fault and what to set instead; the command line
prints it as it is, without a traceback. Anything else that is raised is a defect of this project.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any

SECRETS = frozenset({"hub_token", "push_to_hub_token", "token", "use_auth_token", "api_key"})
_LONGEST = 60
_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}


class AlignmentError(ValueError):
    """Base of every error that is written for the user. The message is the whole explanation."""


class OptionError(AlignmentError):
    """An option, or a combination of options, that cannot be used."""


class DataError(AlignmentError):
    """A data file, row or column that cannot be used."""


class ModelError(AlignmentError):
    """A checkpoint, tokenizer or model object that cannot be used."""


class OutputError(AlignmentError):
    """A folder or file that cannot be written."""


class LastCheckpointError(OutputError):
    """Training is done, and its last checkpoint could not be written."""


class CheckpointError(AlignmentError):
    """A checkpoint that cannot be written, read or continued from."""


class TrainingError(AlignmentError):
    """A run that had to stop: the loss became non-finite, or a step could not be taken."""


class RewardError(AlignmentError):
    """A reward function or judge that raised, or returned what is no score or verdict."""


class HubError(AlignmentError):
    """An upload that failed."""


class Leaving(SystemExit):
    """This process is to end, whatever it is doing: no failure of the code that it passes through."""


def without_secrets(name: str, value: Any) -> Any:
    """A secret's name in the place of its value, also within mappings such as ``model_init_kwargs``."""
    if name in SECRETS and value is not None and not isinstance(value, bool):
        return f"<{name.upper()}>"
    return {key: without_secrets(key, each) for key, each in value.items()} if isinstance(value, dict) else value


def setting(name: str, value: Any) -> str:
    """``name=value`` for a message: on one line, shortened, and without secrets."""
    shown = without_secrets(name, value.value if isinstance(value, Enum) else value)
    text = "<hidden>" if name in SECRETS else repr(shown)
    name = name if len(name) <= 100 else name[:97] + "…"
    return f"{name}={text if len(text) <= 100 else text[:97] + '…'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when one of the names is close, else an empty string."""
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def type_name(value: object) -> str:
    """The type of ``value`` in words, such as ``a boolean``; the Python class name for anything JSON does not have."""
    return "null" if value is None else _TYPES.get(type(value), f"of type {type(value).__name__}")


def show(value: object) -> str:
    """``value`` and its type for an error message, cut to one short line: ``'yes' (a string)``."""
    if value is None:
        return "null"
    text = "true" if value is True else "false" if value is False else repr(value).replace("\n", " ")
    return f"{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'} ({type_name(value)})"


def one_line(error: BaseException) -> str:
    """The message of ``error`` as one line, or its class name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def listing(names: Any) -> str:
    """Names for an error message: ``a, b, c``, or ``none``."""
    return ", ".join(str(name) for name in names) or "none"


def first_line(error: BaseException) -> str:
    """The head of a library's message on one line, with the next line where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
