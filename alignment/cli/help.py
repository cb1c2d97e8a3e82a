"""The text of ``--help`` and the option tables of the documentation, both generated from the option classes.

``python -m alignment.cli.help docs/reference/options.md`` regenerates the tables of a file.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from alignment.config.compatibility.verdicts import verdict_of
from alignment.config.errors import OutputError
from alignment.config.fields import option_fields
from alignment.config.lookup import packaged_names
from alignment.config.options import AlignmentConfig
from alignment.config.refusals import refused_fields
from alignment.config.registry import METHODS

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
BEGIN = "<!-- options: written by `make tables` from alignment/config/ -->"
END = "<!-- end of options -->"


def grouped_fields(cls: type) -> Iterator[tuple[type, list[dataclasses.Field[Any]]]]:
    """Yield each group (a class with a ``TITLE``) of an options class with its fields, base classes first."""
    fields = {field.name: field for field in option_fields(cls) if verdict_of(field) is None}
    for part in reversed(cls.__mro__):
        own = [fields[name] for name in inspect.get_annotations(part) if name in fields]
        if own:
            yield part, own


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
            lines.append(f"\n{vars(group)['TITLE']}{whose}:")
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


def option_tables() -> str:
    """Return a table for each group of options, and the list of options that are not supported yet."""
    parts = [_table(title, fields) for title, fields in _groups()]
    later = ", ".join(f"`{name}`" for name in sorted(refused_fields()))
    return "\n\n".join([*parts, f"Not supported yet; the error names the closest alternative: {later}."])


def _groups() -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """Yield the title and the supported fields of each group once, shared groups first."""
    seen: set[type] = set()
    for cls in METHODS.values():
        for group, fields in grouped_fields(cls):
            working = [field for field in fields if field.name not in refused_fields()]
            if group not in seen and working:
                seen.add(group)
                yield vars(group)["TITLE"], working


def _table(title: str, fields: list[dataclasses.Field[Any]]) -> str:
    rows = [f"| `{field.name}` | {default_text(field)} | {field.metadata['help']} |" for field in fields]
    head = ["| option | default | description |", "|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *rows])


def with_tables(text: str) -> str:
    """Return the text with the tables between its two markers regenerated.

    Raises:
        OutputError: the markers are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise OutputError(f"the file has no markers for the tables; add these two lines: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{option_tables()}\n\n{END}{after}"


def main() -> None:
    """Regenerate the tables of each file named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
