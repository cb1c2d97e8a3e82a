"""The page of the command line, docs/reference/cli.md, written from the commands' own parsers."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

from alignment.cli.commands import COMMANDS
from alignment.cli.help import usage

ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAM = "deepspeed-alignment"
_WIDTH = 88
_KINDS = {"Arguments": "argument"}
_HEAD = """\
# Command line

<!-- written by `make tables` from the parsers in alignment/cli/ -->

Every command can be called as `deepspeed-alignment COMMAND`, as `python -m alignment COMMAND` and, from a checkout, as
`python launch/COMMAND.py`. `COMMAND --help` lists its options, and `deepspeed-alignment --version` prints the version.

Commands exit with status 0 on success, 1 after an error and 130 after Ctrl-C. `status`, `report` and `export` exit
with status 2 if their arguments cannot be parsed. The statuses of stopped runs are in
[Preemption](../guides/preemption.md).
"""
# Commands that accept the options of the methods, and their description.
_OF_METHODS = {
    "train": "The options are listed in [Options](options.md), and in [the API](api/configs.md) by method.",
    "prepare": "All options of [`train`](#train), and `--ranks`.",
    "precompute": "All options of [`train`](#train).",
    "submit": "All options of [`train`](#train), and those of the job:",
}


def command_page() -> str:
    """Return the page."""
    lines = [_HEAD, "| command | description |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {_cell(text)} |" for name, text in COMMANDS.items()]
    for name, text in COMMANDS.items():
        lines += ["", f"## {name}", "", *_section(name, import_module(f"alignment.cli.{name}"), text)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _section(name: str, module: ModuleType, summary: str) -> Iterator[str]:
    program = f"{_PROGRAM} {name}"
    # Defaults from environment variables are shown as if none is set.
    with mock.patch.dict(os.environ, {"COLUMNS": str(_WIDTH)}):
        for variable in [key for key in os.environ if key.startswith("ALIGNMENT_")]:
            del os.environ[variable]
        parser = module._parser(program) if hasattr(module, "_parser") else None
        about = vars(module).get("_ABOUT") or f"{summary[0].upper()}{summary[1:]}."
        yield from _about(about)
        yield from ("```text", _usage(program, parser), "```", "")
    if name in _OF_METHODS:
        yield from (_OF_METHODS[name], "")
    if parser is not None:
        yield from _tables(parser)


def _usage(program: str, parser: argparse.ArgumentParser | None) -> str:
    if parser is not None:
        return parser.format_usage().strip()
    return "\n".join(textwrap.fill(line, _WIDTH) for line in usage(program).splitlines())


def _about(text: str) -> Iterator[str]:
    """Yield the description, with indented paragraphs as code blocks."""
    for paragraph in text.strip("\n").split("\n\n"):
        code = paragraph.startswith("  ")
        yield from ("```text" if code else "", paragraph, "```" if code else "", "")


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    titles = {"positional arguments": "Arguments", "options": "Options"}
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if not actions:
            continue
        title = titles.get(group.title or "", group.title or "")
        yield from (
            f"**{title[0].upper()}{title[1:]}**",
            "",
            f"| {_KINDS.get(title, 'option')} | description |",
            "|---|---|",
        )
        for action in actions:
            yield f"| {_called(action)} | {_cell(_expanded(parser, action))} |"
        yield ""


def _called(action: argparse.Action) -> str:
    """Return the names of an argument with its metavar."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    takes = ""
    if action.nargs != 0:
        metavar = action.metavar if isinstance(action.metavar, str) else None
        takes = " " + (metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "VALUE"))
    return ", ".join(f"`{_cell(name + takes)}`" for name in action.option_strings)


def _expanded(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
