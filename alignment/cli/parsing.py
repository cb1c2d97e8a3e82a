"""The command line: ``[--local_rank=N] [recipe.yaml] --key value --key=value --flag``.

A recipe sets a method and options, flat or in sections; the command line overrides it. Values are passed on as they
are: the options class converts them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from alignment.cli.output import print_and_leave
from alignment.cli.recipes import read_recipe
from alignment.config import checks
from alignment.config.compatibility.names import older_names, read_names
from alignment.config.counterparts import without_counterparts
from alignment.config.errors import OptionError, setting
from alignment.config.fields import hints, members
from alignment.config.options import AlignmentConfig
from alignment.config.refusals import unknown_option
from alignment.config.registry import METHODS, option_names


class Parser(argparse.ArgumentParser):
    """An argument parser that raises an OptionError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"command line: {message}; --help lists the options")


class Glimpse(NamedTuple):
    """The options needed before parsing: the method, whose class declares the options, and whether to use the CPU."""

    method: str | None
    use_cpu: bool


def glimpse(argv: list[str]) -> Glimpse:
    """Read the method and ``use_cpu`` from the arguments or the recipe; errors are left to :func:`parse`."""
    loose, given = _split(argv)
    recipe: dict[str, Any] = {}
    if loose:
        with contextlib.suppress(OptionError):
            recipe = read_recipe(loose[0])
    named = given.get("method")
    method = named[0] if named else recipe.get("method")
    flag = given.get("use_cpu", given.get("no_cuda"))
    use_cpu = str(recipe.get("use_cpu", False) if flag is None else (flag or ["true"])[0])
    return Glimpse(method if isinstance(method, str) else None, use_cpu.lower() in ("true", "1", "yes", "on"))


def outside_method(argv: list[str]) -> dict[str, type[AlignmentConfig]]:
    """Return the requested method and its options class, which is imported, if it is a third-party method."""
    asked = glimpse(argv).method
    return {asked: METHODS[asked]} if asked is not None and METHODS.is_outside(asked) else {}


def parse(argv: list[str], program: str = "launch/train.py") -> AlignmentConfig:
    """Parse the options of the method that the recipe or ``--method`` names.

    Args:
        argv: arguments without the program name.
        program: program name in usage lines.

    Raises:
        OptionError: an argument, recipe or option is invalid.
        SystemExit: with status 0, after ``--help``.
    """
    outside = outside_method(argv)
    recipe_name, given = read_arguments(argv, outside.values())
    if "help" in given:
        from alignment.cli.help import help_text

        several, first = os.environ.get("WORLD_SIZE", "1") != "1", os.environ.get("RANK", "0") == "0"
        if several and not first:
            raise SystemExit(0)
        print_and_leave(help_text({**METHODS, **outside}, program))
    recipe = read_recipe(recipe_name, outside.values()) if recipe_name is not None else {}
    method = _method(given.pop("method", None), recipe.pop("method", None), recipe_name)
    cls = METHODS[method]
    names = option_names(cls) | set(older_names(cls))
    for name, value in recipe.items():
        if name not in names:
            raise OptionError(f"{recipe_name}: {unknown_option(cls.method, name, value, names)}")
    for name, value in given.items():
        if name not in names:
            raise unknown_option(cls.method, name, value, names)
    try:
        recipe, given = read_names(cls, recipe), read_names(cls, given)
        recipe = without_counterparts(cls, recipe, given)
        options = METHODS.named(cls(**{**recipe, **given}), method)
        checks.check_command_line(options)
    except OptionError as error:
        at_fault = re.match(r"(\w+)=", str(error))
        if at_fault and at_fault[1] in recipe and at_fault[1] not in given:
            raise OptionError(f"{recipe_name}: {error}") from None
        raise
    return options


def read_arguments(
    argv: list[str], outside: Iterable[type[AlignmentConfig]] = ()
) -> tuple[str | None, dict[str, Any]]:
    """Return the recipe's name, if any, and the options as strings (lists of strings for list options).

    If an option is repeated, the last value is used.

    Args:
        argv: arguments without the program name.
        outside: options classes of third-party methods.

    Raises:
        OptionError: an option that no method has, or a value that belongs to no option.
    """
    owners: dict[str, list[type]] = {"method": []}
    for cls in (*METHODS.values(), *outside):
        for name in (*option_names(cls), *older_names(cls)):
            owners.setdefault(name, []).append(cls)
    loose, options = _split(argv)
    given: dict[str, Any] = {}
    for name, values in options.items():
        if name in ("-h", "help"):
            given["help"] = True
        elif name not in owners:
            raise unknown_option("", name, values[0] if values else True)
        else:
            given[name] = _value(name, values, owners[name])
    if len(loose) > 1:
        raise OptionError(
            f"command line: {loose[1]!r} belongs to no option; write the recipe first, then options as --key value"
        )
    return loose[0] if loose else None, given


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the arguments that belong to no option, and the values of each option; the last of a name counts."""
    loose: list[str] = []
    given: dict[str, list[str]] = {}
    values = loose
    for token in without_local_rank(argv):
        if not token.startswith("-") or not token.strip("-") or _is_negative(token):
            values.append(token)
        else:
            name, has_value, value = token.removeprefix("--").partition("=")
            given[name] = [value] if has_value else []
            values = loose if has_value else given[name]
    return loose, given


def without_local_rank(argv: Sequence[str]) -> Sequence[str]:
    """Drop the ``--local_rank`` that torch's and DeepSpeed's launchers put first; the environment has it as well."""
    if argv and argv[0].startswith(("--local_rank", "--local-rank")):
        return argv[1 if "=" in argv[0] else 2 :]
    return argv


def _is_negative(token: str) -> bool:
    """Return whether a token is a negative number, such as -1e-6 or -inf."""
    with contextlib.suppress(ValueError):
        float(token)
        return token.startswith("-")
    return False


def _value(name: str, values: list[str], owners: Iterable[type]) -> Any:
    """Return an option's value: true for a flag without value, a list of values for list options only."""
    if not values:
        return True
    if len(values) == 1:
        return values[0]
    if any(list in members(hints(cls)[older_names(cls).get(name, name)]) for cls in owners):
        return values
    raise OptionError(f"--{name} {' '.join(values)}: expected one value; {values[1]!r} belongs to no option")


def _method(given: Any, in_recipe: Any, recipe_name: str | None) -> str:
    method = given if given is not None else in_recipe
    if isinstance(method, (list, dict)):
        raise OptionError(f"{recipe_name}: {setting('method', method)}: expected one of {', '.join(METHODS)}")
    if method is None:
        where = f"{recipe_name}: method is missing" if recipe_name else "method=None: no recipe and no --method"
        raise OptionError(f"{where}; set method to one of {', '.join(METHODS)}")
    try:
        METHODS.check(str(method))
    except OptionError as error:
        raise OptionError(f"{recipe_name}: {error}" if given is None else str(error)) from None
    return str(method)
