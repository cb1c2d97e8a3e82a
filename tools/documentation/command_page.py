"""The page of the command line, docs/reference/cli.md, written from the commands' own parsers."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from unittest import mock

from alignment.cli.commands import COMMANDS
from alignment.cli.help import usage
from tools.documentation.page import table, with_generated

_PROGRAM = "deepspeed-alignment"
_WIDTH = 88
# Commands that accept the options of the methods, and their description.
_OF_METHODS = {
    "train": "The options are listed in [Options](options.md), and in [the API](api/configs.md) by method.",
    "prepare": "All options of [`train`](#train), and `--ranks`.",
    "plan": "All options of [`train`](#train). The guide [Does it fit?](../guides/memory.md) explains the output.",
    "vllm-serve": "All options of [`train`](#train), and `--run`.",
    "precompute": "All options of [`train`](#train).",
    "submit": "All options of [`train`](#train), and those of the job:",
}


def command_page() -> str:
    """Return the page."""
    lines = [*table("command | description", ((f"[`{name}`](#{name})", text) for name, text in COMMANDS.items()))]
    for name, text in COMMANDS.items():
        lines += [
            "",
            f"## {name}",
            "",
            *_section(name, import_module(f"alignment.cli.{name.replace('-', '_')}"), text),
        ]
    return with_generated("cli.md", lines)


def _section(name: str, module: ModuleType, summary: str) -> Iterator[str]:
    program = f"{_PROGRAM} {name}"
    # Defaults from environment variables are shown as if none is set.
    with mock.patch.dict(os.environ, {"COLUMNS": str(_WIDTH)}):
        for variable in [key for key in os.environ if key.startswith("ALIGNMENT_")]:
            del os.environ[variable]
        parser = module._parser(program) if hasattr(module, "_parser") else None
        about = vars(module).get("_ABOUT") or f"{summary[0].upper()}{summary[1:]}."
        for paragraph in about.strip("\n").split("\n\n"):  # an indented one is code
            code = paragraph.startswith("  ")
            yield from ("```text" if code else "", paragraph, "```" if code else "", "")
        lines = (textwrap.fill(line, _WIDTH) for line in usage(program).splitlines())
        yield from ("```text", parser.format_usage().strip() if parser else "\n".join(lines), "```", "")
    if name in _OF_METHODS:
        yield from (_OF_METHODS[name], "")
    if parser is None:
        return
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if not actions:
            continue
        title = {"positional arguments": "arguments"}.get(group.title or "", group.title or "")
        kind = "argument" if title == "arguments" else "option"
        yield from (f"**{title[0].upper()}{title[1:]}**", "")
        yield from table(f"{kind} | description", ((_called(action), _help(parser, action)) for action in actions))
        yield ""


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _cell(parser._get_formatter()._expand_help(action)) if action.help else ""


def _called(action: argparse.Action) -> str:
    """Return the names of an argument with its metavar."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else "VALUE"
    takes = f" {action.metavar or choices}" if action.nargs != 0 else ""
    return ", ".join(f"`{_cell(name + takes)}`" for name in action.option_strings)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
