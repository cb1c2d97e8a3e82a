"""The text of ``--help``, made from the option classes."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from alignment.config.fields import Strategy
from alignment.config.options import AlignmentConfig
from alignment.config.paths import packaged_names
from alignment.config.refusals import refused_fields

_USAGE = """\
usage: [deepspeed|torchrun|python] launch/train.py [RECIPE] [--method METHOD] [--OPTION VALUE ...]

RECIPE is a YAML file or the name of a packaged one ({recipes}).
Options given here override it.
A truth value needs no VALUE; a mapping is given as JSON."""


def grouped_fields(cls: type) -> Iterator[tuple[type, list[dataclasses.Field[Any]]]]:
    """The options of a class by the group, a class with a ``TITLE``, that declares them; base classes first."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for part in reversed(cls.__mro__):
        own = [fields[name] for name in inspect.get_annotations(part) if name in fields]
        if own:
            yield part, own


def default_text(field: dataclasses.Field[Any]) -> str:
    """A default as one would write it."""
    if field.default is None:
        return "unset"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return str(field.default.value if isinstance(field.default, Strategy) else field.default)


def help_text(methods: Mapping[str, type[AlignmentConfig]]) -> str:
    """Every option with its help and default: the shared groups once, then the own ones of each of these methods."""
    lines = [_USAGE.format(recipes=", ".join(packaged_names("recipes")))]
    seen: set[type] = set()
    for cls in methods.values():
        for group, fields in grouped_fields(cls):
            if group in seen:
                continue
            seen.add(group)
            owners = " | ".join(name for name, other in methods.items() if issubclass(other, group))
            whose = "" if issubclass(AlignmentConfig, group) else f" (--method {owners})"
            lines.append(f"\n{vars(group)['TITLE']}{whose}:")
            lines += [_entry(field) for field in fields]
    return "\n".join(lines)


def _entry(field: dataclasses.Field[Any]) -> str:
    later = " (not supported yet)" if field.name in refused_fields() else ""
    text = f"{field.metadata['help'].replace('`', '')} [{default_text(field)}]{later}"
    return textwrap.fill(text, 100, initial_indent=f"  --{field.name}".ljust(33) + " ", subsequent_indent=" " * 34)
