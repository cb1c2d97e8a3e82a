"""The text of ``--help``, generated from the option classes."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from alignment.config.compatibility.verdicts import verdict_of
from alignment.config.fields import option_fields
from alignment.config.lookup import packaged_names
from alignment.config.options import AlignmentConfig
from alignment.config.refusals import refused_fields

_USAGE = """\
usage: {program} [RECIPE] [--method METHOD] [--OPTION VALUE ...]
{launchers}

RECIPE is a YAML file or the name of a packaged recipe ({recipes}).
Options on the command line override the recipe.
A boolean option without VALUE is set to true. Pass mappings as JSON."""
# How to start one process per GPU, by the name of the program.
_LAUNCHED = {
    script: f"with a launcher: deepspeed {script} …, torchrun --nproc_per_node N {script} …"
    for script in ("launch/train.py", "launch/precompute.py")
}
_LAUNCHED_MODULE = (
    "with a launcher: deepspeed --module alignment {name} …, torchrun --nproc_per_node N -m alignment {name} …"
)


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
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return str(field.default.value if isinstance(field.default, Enum) else field.default)


def help_text(methods: Mapping[str, type[AlignmentConfig]], program: str = "launch/train.py") -> str:
    """Return the text of ``--help``: the shared option groups once, then the groups of each method.

    Args:
        methods: options classes by method name.
        program: program name in usage lines.
    """
    lines = [usage(program)]
    seen: set[type] = set()
    for cls in methods.values():
        for group, fields in grouped_fields(cls):
            if group in seen:
                continue
            seen.add(group)
            owners = " | ".join(name for name, other in methods.items() if issubclass(other, group))
            whose = "" if issubclass(AlignmentConfig, group) else f" (--method {owners})"
            lines.append(f"\n{title_of(group)}{whose}:")
            lines += [_entry(field) for field in fields]
    return "\n".join(lines)


def usage(program: str) -> str:
    """Return the lines above the options, for a command called ``program``."""
    recipes = ", ".join(packaged_names("recipes"))
    launchers = _LAUNCHED.get(program) or _LAUNCHED_MODULE.format(name=program.split()[-1])
    return _USAGE.format(program=program, launchers=launchers, recipes=recipes)


def _entry(field: dataclasses.Field[Any]) -> str:
    later = " (not supported yet)" if field.name in refused_fields() else ""
    text = f"{field.metadata['help'].replace('`', '')} [{default_text(field)}]{later}"
    return textwrap.fill(text, 100, initial_indent=f"  --{field.name}".ljust(33) + " ", subsequent_indent=" " * 34)
