"""An option takes a value from elsewhere, unless it says something else itself."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import convert, hints, option_fields

AUTO = "auto"


def default_of(options: Any, name: str) -> Any:
    """The default of an option."""
    return next(field.default for field in option_fields(options) if field.name == name)


def said(place: str, value: Any) -> str:
    """``place=value`` for a message, as :func:`setting` says it, but with the whole place."""
    return place + setting("", value)


def contradiction(options: Any, name: str, place: str, value: Any) -> OptionError:
    """The error for an option that says something else than another place.

    Args:
        options: the options.
        name: of the option.
        place: where the other value stands, in words that a message begins with.
        value: the other one.
    """
    own = setting(name, getattr(options, name))
    return OptionError(f"{said(place, value)} contradicts the option {own}; leave one of them out")


def take(options: Any, name: str, place: str, value: Any) -> None:
    """Set an option to a value from elsewhere; the same once more changes nothing.

    Args:
        options: the options; an option that is at its default takes the value.
        name: of the option.
        place: where the value stands, as :func:`contradiction` says it.
        value: of any type that the option can be converted from.

    Raises:
        OptionError: the option is set to something else, or the value is of another type.
    """
    try:
        wanted = convert(name, value, hints(options.__class__)[name], default_of(options, name))
    except OptionError as error:
        raise OptionError(f"{place}: {error}") from None
    own = getattr(options, name)
    if own == wanted:
        return
    if own != default_of(options, name):
        raise contradiction(options, name, place, value)
    setattr(options, name, wanted)
