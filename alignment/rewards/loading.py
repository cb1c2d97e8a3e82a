"""A user's function, class or object by name: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError
from alignment.config.refusals import shown
from alignment.config.user_code import FAILURES, load_named, raised
from alignment.data.wording import show


def load_callable(given: str, option: str, method: str | None = None) -> Any:
    """What ``given`` names; an instance of it, made without arguments, where it is a class.

    Args:
        given: ``path/to/file.py:name`` or ``package.module:name``.
        option: the option that says so, for messages.
        method: a method that makes an object as good as a callable, such as ``judge``.

    Raises:
        OptionError: there is no such file, module or name, importing it fails, or it cannot be called.
    """
    where, found = shown(option, given), load_named(given, option)
    if isinstance(found, type):
        found = _instance(found, where)
    if not callable(found) and not (method is not None and callable(getattr(found, method, None))):
        wanted = "a function or class" if method is None else f"a function, or a class with a method {method!r}"
        name = given.rpartition(":")[2]
        raise OptionError(f"{where}: {name} is {show(found)}, which cannot be called; name {wanted}")
    return found


def _instance(kind: type, where: str) -> Any:
    try:
        return kind()
    except FAILURES as error:
        raise OptionError(
            f"{where}: making a {kind.__name__} without arguments raised {raised(error)}; give its arguments defaults"
        ) from error
