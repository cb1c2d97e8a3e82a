"""The command line: ``[--local_rank=N] [recipe.yaml] --key value --key=value --flag``.

A recipe sets a method and options, flat or in sections; the command line overrides it. Values are passed on as they
are: the options class converts them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from alignment import __version__
from alignment.cli.output import print_and_leave
from alignment.cli.recipes import read_recipe
from alignment.compat.trl.names import read_names
from alignment.config import checks
from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS, check_names


class Parser(argparse.ArgumentParser):
    """An argument parser that raises an OptionError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"command line: {message}; --help lists the options")


class Glimpse(NamedTuple):
    """The options needed before parsing: the method, whose class declares the options, and whether to use the CPU."""

    method: str | None
    use_cpu: bool


def gigabytes(text: str) -> float:
    """Convert an argument that is an amount of memory in GB."""
    value = float(text)
    if not 1 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"expected gigabytes, from 1 to 10000, found {text}")
    return value


def glimpse(argv: list[str]) -> Glimpse:
    """Read the method and ``use_cpu`` from the arguments or the recipe; errors are left to :func:`parse`."""
    options: dict[str, Any] = {}
    with contextlib.suppress(OptionError):
        recipe, given = read_arguments(argv)
        options |= given
        options = {**(read_recipe(recipe) if recipe is not None else {}), **given}
    method, use_cpu = options.get("method"), options.get("use_cpu", options.get("no_cuda", False))
    return Glimpse(method if isinstance(method, str) else None, str(use_cpu).lower() in ("true", "1", "yes", "on"))


def parse(argv: list[str], program: str = "launch/train.py", *, data: bool = True) -> AlignmentConfig:
    """Parse the options of the method that the recipe or ``--method`` names.

    Args:
        argv: the arguments.
        program: named in usage lines.
        data: whether a dataset is required.

    Raises:
        OptionError: an argument, recipe or option is invalid.
        SystemExit: with status 0, after ``--help`` or ``--version``.
    """
    asked = glimpse(argv).method
    outside = {asked: METHODS[asked]} if asked is not None and METHODS.is_outside(asked) else {}
    recipe_name, given = read_arguments(argv)
    if given.keys() & {"help", "version"} and os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)
    if "help" in given:
        from alignment.cli.help import help_text

        print_and_leave(help_text({**METHODS, **outside}, program))
    if "version" in given:
        print_and_leave(f"deepspeed-alignment {__version__}")
    if "config" in given:  # as in scripts of TRL
        raise OptionError(f"{setting('config', given['config'])}: write the recipe first, without --config")
    recipe = {} if recipe_name is None else read_recipe(recipe_name, outside.values())
    method = given.get("method", recipe.get("method"))
    if method is None:
        where = f"{recipe_name}: method is missing" if recipe_name else "method=None: no recipe and no --method"
        raise OptionError(f"{where}; set method to one of {', '.join(METHODS)}")
    try:
        METHODS.check(str(method))
        cls = METHODS[str(method)]
        recipe.pop("method", None), given.pop("method", None)
        check_names(cls, recipe | given)
        recipe, given = read_names(cls, recipe), read_names(cls, given)
        options = METHODS.named(cls(**(checks.without_counterparts(cls, recipe, given) | given)), str(method))
        checks.check_command_line(options, data=data)
    except OptionError as error:
        at_fault = str(error).partition("=")[0]
        if at_fault in recipe and at_fault not in given:
            raise OptionError(f"{recipe_name}: {error}") from None
        raise
    return options


def read_arguments(argv: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the recipe's name, if any, and the options: as strings, lists of strings, or true without a value.

    If an option is repeated, the last value is used.

    Raises:
        OptionError: a value that belongs to no option.
    """
    loose, options = _split(argv)
    if len(loose) > 1:
        raise OptionError(
            f"command line: {loose[1]!r} belongs to no option; write the recipe first, then options as --key value"
        )
    given = {
        "help" if name == "-h" else name: values if len(values) > 1 else values[0] if values else True
        for name, values in options.items()
    }
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
