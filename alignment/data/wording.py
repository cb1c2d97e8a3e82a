"""How values of a user's data are named in error messages: short, on one line, with the type in JSON's words."""

from __future__ import annotations

from typing import Any

_LONGEST = 60
_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}


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
