"""The text of ``--help``, generated from the option classes."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alignment.compat.trl.verdicts import verdict_of
from alignment.config.fields import option_fields
from alignment.config.lookup import packaged_names
from alignment.config.options import AlignmentConfig

_USAGE = """\
usage: {program} [RECIPE] [--method METHOD] [--OPTION VALUE ...]
{launchers}
RECIPE is a YAML file or the name of a packaged recipe ({recipes}).
Options on the command line override the recipe.
A boolean option without VALUE is set to true. Pass mappings as JSON."""
_ALONE = ("plan", "prepare", "vllm-serve", "vllm_serve")  # commands that run in a single process


def grouped_fields(cls: type) -> Iterator[tuple[type, list[dataclasses.Field[Any]]]]:
    """Yield each group (a class that declares options) of an options class with its fields, base classes first."""
    fields = {field.name: field for field in option_fields(cls) if verdict_of(field) is None}
    for part in reversed(cls.__mro__):
        own = [fields[name] for name in inspect.get_annotations(part) if name in fields]
        if own:
            yield part, own


def title_of(group: type) -> str:
    """Return the title of a group: its ``TITLE``, or else its docstring."""
    return str(vars(group).get("TITLE") or (group.__doc__ or "").partition(".")[0])


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default of an option as a user would write it."""
    if field.default is None:
        return "unset"
    text = str(field.default)
    return text.lower() if isinstance(field.default, bool) else text


def help_text(methods: Mapping[str, type[AlignmentConfig]], program: str = "launch/train.py") -> str:
    """Return the text of ``--help`` of ``program``: the shared option groups once, then those of each method."""
    lines, groups = [usage(program)], dict[type, list[dataclasses.Field[Any]]]()
    for cls in methods.values():
        for group, fields in grouped_fields(cls):
            groups.setdefault(group, fields)
    for group, fields in groups.items():
        owners = " | ".join(name for name, cls in methods.items() if issubclass(cls, group))
        whose = "" if issubclass(AlignmentConfig, group) else f" (--method {owners})"
        lines += [f"\n{title_of(group)}{whose}:", *map(_entry, fields)]
    return "\n".join(lines)


def usage(program: str) -> str:
    """Return the lines above the options, for a command called ``program``."""
    name = program.split()[-1]
    module, launchers = ("", "") if name.endswith(".py") else ("--module alignment ", "-m alignment "), ""
    if Path(name).stem not in _ALONE:
        launchers = (
            f"with a launcher: deepspeed {module[0]}{name} …, torchrun --nproc_per_node N {module[1]}{name} …\n"
        )
    return _USAGE.format(program=program, launchers=launchers, recipes=", ".join(packaged_names("recipes")))


def _entry(field: dataclasses.Field[Any]) -> str:
    text = f"{field.metadata['help'].replace('`', '')} [{default_text(field)}]"
    return textwrap.fill(text, 100, initial_indent=f"  --{field.name}".ljust(33) + " ", subsequent_indent=" " * 34)
