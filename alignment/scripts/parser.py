"""An argument parser for dataclasses that also reads arguments and environment variables from a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import yaml
from transformers import HfArgumentParser

from alignment.config.errors import OptionError, first_line, setting
from alignment.config.options import AlignmentConfig

_FLAG = "--config"


class TrlParser(HfArgumentParser):  # type: ignore[misc]
    """``HfArgumentParser`` with ``--config FILE``, like TRL's class of this name.

    The file sets arguments by name; the command line overrides it. Variables in its mapping ``env``, if present, are
    added to the environment before the arguments are parsed::

        env: {TOKENIZERS_PARALLELISM: false}
        model_name_or_path: Qwen/Qwen2-0.5B
        learning_rate: 5e-7

    ``trust_remote_code`` is an option of the trainer as well as of TRL's ``ModelConfig``; it is set in both.

    Args:
        dataclass_types: the dataclasses, in the order in which they are returned, or a single dataclass.
        **kwargs: arguments of ``HfArgumentParser``.

    Raises:
        ValueError: a dataclass has a field ``config``.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        self._arguments: list[argparse.Action] = []
        self._commands: list[Any] = []
        if dataclasses.is_dataclass(dataclass_types):
            dataclass_types = [dataclass_types]
        dataclass_types = list(dataclass_types or ())
        for each in dataclass_types:
            if any(field.name == "config" for field in dataclasses.fields(each)):
                raise ValueError(
                    f"Dataclass {each.__name__} has a field named 'config', which --config FILE needs; rename it"
                )
        super().__init__(dataclass_types, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self._arguments.append(action)
        return action

    def add_subparsers(self, **kwargs: Any) -> Any:
        commands = super().add_subparsers(**kwargs)
        self._commands.append(commands)
        return commands

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse the command line and the file passed as ``--config`` into instances of the dataclasses.

        Args:
            args: the arguments. Defaults to those of the process.
            return_remaining_strings: append unknown arguments as the last item: those of the file, then those of the
                command line.
            fail_with_unknown_args: raise an error for unknown keys of the file; if false, warn.
            separate_remaining_strings: append the unknown arguments of file and command line as two items.

        Raises:
            OptionError: the file cannot be read or is invalid.
            ValueError: an unknown argument.
        """
        given = list(sys.argv[1:] if args is None else args)
        path, given = _config_path(given)
        unknown = self.set_defaults_with_config(**_read(path)) if path is not None else []
        output = self.parse_args_into_dataclasses(given, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            *parsed, remaining = output
            if separate_remaining_strings:
                return (*parsed, unknown, remaining)
            return (*parsed, unknown + remaining)
        if unknown and fail_with_unknown_args:
            raise OptionError(f"{path}: {' '.join(unknown)}: unknown argument; remove it, or correct its name")
        if unknown:
            warnings.warn(f"{path}: {' '.join(unknown)}: unknown argument; it is ignored", stacklevel=2)
        return tuple(output)

    def parse_args_into_dataclasses(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output: tuple[Any, ...] = super().parse_args_into_dataclasses(*args, **kwargs)
        _share_trust(output)
        return output

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Set defaults of arguments, also of subcommands, which are then no longer required.

        Returns:
            Unknown arguments as strings: ``--key``, ``value``, …
        """
        known = self._set_defaults(kwargs)
        return [text for key, value in kwargs.items() if key not in known for text in (f"--{key}", str(value))]

    def _set_defaults(self, values: dict[str, Any]) -> set[str]:
        """Set the defaults of known arguments and return their names."""
        known: set[str] = set()
        for action in self._arguments:
            if action.dest in values:
                action.default = values[action.dest]
                action.required = False
                known.add(action.dest)
        for commands in self._commands:
            for parser in commands.choices.values():
                known |= parser._set_defaults(values)
        return known


def _config_path(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file passed as ``--config``, if any, and the remaining arguments."""
    rest: list[str] = []
    path: str | None = None
    waiting = False
    for argument in arguments:
        if waiting:
            path, waiting = argument, False
        elif argument == _FLAG:
            waiting = True
        elif argument.startswith(f"{_FLAG}="):
            path = argument.partition("=")[2]
        else:
            rest.append(argument)
    if waiting:
        raise OptionError(f"{_FLAG} expects a value; write {_FLAG} FILE.yaml")
    return path, rest


def _read(path: str) -> dict[str, Any]:
    """Read the values of a file, and add those under ``env`` to the environment."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise OptionError(f"{_FLAG} {path}: cannot be read ({first_line(error)}); pass a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{_FLAG} {path}: invalid YAML: {first_line(error)}; correct it") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise OptionError(f"{path}: expected a mapping, found {type(content).__name__}; write options as key: value")
    environment = content.pop("env", {})
    if not isinstance(environment, dict):
        raise OptionError(f"{path}: {setting('env', environment)}: `env` field should be a dict in the YAML file.")
    for name, value in environment.items():
        os.environ[str(name)] = str(value)
    return {str(key): value for key, value in content.items()}


def _share_trust(output: Iterable[Any]) -> None:
    """Set ``trust_remote_code`` in all options if it is set in any of the dataclasses."""
    holders = [each for each in output if getattr(each, "trust_remote_code", None) is not None]
    if any(each.trust_remote_code is True for each in holders):
        for each in holders:
            if isinstance(each, AlignmentConfig):
                each.trust_remote_code = True
