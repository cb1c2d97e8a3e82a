"""Checks of a block that do not run it: it parses, and the names and options in it exist."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib
import yaml

from alignment.cli import commands as command_line
from alignment.cli.parsing import parse, read_arguments
from alignment.cli.recipes import read_recipe
from alignment.compat.trl.names import older_names
from alignment.config.errors import AlignmentError
from alignment.config.lookup import packaged_names
from alignment.config.registry import METHODS, option_names
from support.pages.blocks import ROOT, Block, BlockError
from support.pages.commands import Command, commands_of, simple_commands

_QUOTED = re.compile(r'"--[\w-]+"')
_TRAINING = ("train", "precompute", "prepare", "plan")
_PARSED = ("status", "export", "sample", "compare", "report")  # commands with an argparse parser, which exits


def check(block: Block) -> None:
    """Check a block without running it.

    Raises:
        BlockError: the block is invalid; the message contains the page, the line and the problem.
    """
    try:
        _CHECKS[block.language](block)
    except BlockError:
        raise
    except (AlignmentError, SyntaxError, ValueError, yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise BlockError(f"{block.name}: {error}") from None


def script_of(block: Block) -> str:
    """Return the commands of a ``bash`` or ``console`` block as a script."""
    if block.language == "bash":
        return block.text
    return "".join(f"{command}\n" for command, _ in console(block))


def console(block: Block) -> list[tuple[str, str]]:
    """Return each command of a ``console`` block with the output shown after it.

    Raises:
        BlockError: the block does not begin with ``$ command``.
    """
    found: list[tuple[str, str]] = []
    going_on = False
    for line in block.text.splitlines():
        if going_on:
            found[-1] = (f"{found[-1][0]}\n{line.removeprefix('> ')}", "")
        elif line.startswith("$ "):
            found.append((line[2:], ""))
        elif not found:
            raise BlockError(f"{block.name}: a console block begins with a line '$ command'")
        else:
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
            continue
        going_on = line.rstrip().endswith("\\")
    return found


def _check_shell(block: Block) -> None:
    script = script_of(block)
    if block.file:
        return
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BlockError(f"{block.name}: {done.stderr.strip()}")
    for command in commands_of(script):
        check_command(block, command)
    for words in simple_commands(script):
        _check_script(block, words)


def _check_script(block: Block, words: list[str]) -> None:
    """Check that a script in ``benchmarks/`` exists and that the sources in its folder declare the options."""
    place = next((place for place, word in enumerate(words) if word.startswith("benchmarks/")), None)
    if place is None:
        return
    script = ROOT / words[place]
    if not script.is_file():
        raise BlockError(f"{block.name}: {words[place]}: no such script")
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(script.parent.glob("*.py")))
    for option in (word.partition("=")[0] for word in words[place + 1 :] if word.startswith("--")):
        if not {f'"{option}"', f'"{option.replace("--no-", "--", 1)}"'} & set(_QUOTED.findall(sources)):
            raise BlockError(f"{block.name}: {words[place]} has no option {option}")


def check_command(block: Block, command: Command) -> None:
    """Parse the command's options without running it.

    Raises:
        BlockError: the command does not exist, or does not accept these options.
    """
    if command.name not in command_line.COMMANDS:
        if command.name.startswith("-"):
            return  # --help, --version
        raise BlockError(f"{block.name}: {command.name!r}: no such command")
    if "--help" in command.arguments or "-h" in command.arguments:
        return
    if command.name in _TRAINING or command.name == "submit":
        _check_options(block, command)
    elif command.name in _PARSED:
        parser = importlib.import_module(f"alignment.cli.{command.name}")._parser(command.name)
        _parsed(block, parser, list(command.arguments))


def _check_options(block: Block, command: Command) -> None:
    arguments = list(command.arguments)
    if command.name == "submit":
        from alignment.cli.submit import _parser

        end = arguments.index("--") if "--" in arguments else len(arguments)
        arguments = _parser("submit").parse_known_args(arguments[:end])[1]
    if command.name == "prepare":
        from alignment.cli.prepare import ranks_parser

        arguments = ranks_parser("prepare").parse_known_args(arguments)[1]
    if command.name == "plan":
        from alignment.cli.plan import plan_parser

        arguments = plan_parser("plan").parse_known_args(arguments)[1]
    if "--method" in arguments and ":" in arguments[arguments.index("--method") + 1]:
        return  # its file is imported where the command runs
    recipe, given = read_arguments(arguments)
    its_own = recipe is not None and recipe.endswith((".yaml", ".yml", ".json")) and not recipe.startswith("launch/")
    if not its_own or Path(str(recipe)).is_file() or recipe in packaged_names("recipes"):
        parse(arguments, data=command.name != "plan")
        return
    # A recipe that the page writes later or the reader provides: check at least the names of the options.
    method = given.pop("method", None)
    for name in given:
        if method and name not in option_names(METHODS[method]):
            raise BlockError(f"{block.name}: {method} has no option {name}")


def _parsed(block: Block, parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    def fail(message: str) -> None:
        raise BlockError(f"{block.name}: {parser.prog}: {message}")

    parser.error = fail  # type: ignore[method-assign, assignment]
    parser.parse_args(arguments)


def _check_python(block: Block) -> None:
    tree = ast.parse(textwrap.dedent(block.text), filename=block.name)
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.split(".")[0] == "alignment" for module in modules):  # others may exist only where it runs
            try:
                exec(ast.unparse(node), names)
            except ImportError as error:
                raise BlockError(f"{block.name}: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _check_call(block, node, names)


def _check_call(block: Block, node: ast.Call, names: dict[str, Any]) -> None:
    """Check the keywords of a call of one of our options classes."""
    called = names.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if not (isinstance(called, type) and dataclasses.is_dataclass(called) and hasattr(called, "method")):
        return
    known = {field.name for field in dataclasses.fields(called)} | set(older_names(called))
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            raise BlockError(f"{block.name}: {called.__name__} has no option {keyword.arg!r}")


def _check_jsonl(block: Block) -> None:
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        try:
            json.loads(line)
        except ValueError as error:
            raise BlockError(f"{block.page}:{number}: {error}") from None


def _check_yaml(block: Block) -> None:
    content = yaml.safe_load(block.text)
    if not isinstance(content, dict) or content.get("method") not in METHODS:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(block.text)
        recipe = read_recipe(str(path))
    cls = METHODS[recipe["method"]]
    unknown = recipe.keys() - {"method"} - set(option_names(cls)) - set(older_names(cls))
    if unknown:
        raise BlockError(f"{block.name}: {cls.method} has no option {', '.join(sorted(unknown))}")


_CHECKS: dict[str, Callable[[Block], object]] = {
    "bash": _check_shell,
    "console": _check_shell,
    "python": _check_python,
    "json": lambda block: json.loads(block.text),
    "jsonl": _check_jsonl,
    "yaml": _check_yaml,
    "toml": lambda block: tomllib.loads(block.text),
    "text": lambda block: None,
}
