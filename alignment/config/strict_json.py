"""JSON that users write, read without losing or guessing anything."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from alignment.config.errors import OptionError, one_line, setting


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is not JSON.
        OptionError: a key is there twice, a number cannot be one, or values are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, OptionError):
        raise
    except ValueError as error:
        raise OptionError(one_line(error)) from None
    except RecursionError:
        raise OptionError("it is nested too deeply; write out what is meant") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a mapping; of two equal keys the first would be lost without a word."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise OptionError(f"{setting(key, value)}: the key is there twice; remove one")
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise OptionError(f"{name} is not a JSON value; write a number, or leave the key out")
