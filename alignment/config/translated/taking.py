"""Set an option from another program's setting, unless the option is already set to another value."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import convert, option_fields

AUTO = "auto"


def default_of(options: Any, name: str) -> Any:
    """Return the default of an option."""
    return next(field.default for field in option_fields(options) if field.name == name)


def said(place: str, value: Any) -> str:
    """Format ``place=value`` for a message like :func:`setting`, but without shortening the place."""
    return place + setting("", value)


def contradiction(options: Any, name: str, place: str, value: Any) -> OptionError:
    """Return the error for an option that contradicts a setting.

    Args:
        options: the options.
        name: name of the option.
        place: location of the setting, with which the message begins.
        value: value of the setting.
    """
    own = setting(name, getattr(options, name))
    return OptionError(f"{said(place, value)} contradicts the option {own}; remove one of them")


def take(options: Any, name: str, place: str, value: Any) -> None:
    """Set an option that is at its default to the value of a setting. Idempotent.

    Args:
        options: the options.
        name: name of the option.
        place: location of the setting, for messages.
        value: value of the setting, of any type that can be converted to the option's.

    Raises:
        OptionError: the option is set to another value, or the value has a wrong type.
    """
    try:
        wanted = convert(type(options), name, value)
    except OptionError as error:
        raise OptionError(f"{place}: {error}") from None
    own = getattr(options, name)
    if own == wanted:
        return
    if own != default_of(options, name):
        raise contradiction(options, name, place, value)
    setattr(options, name, wanted)
