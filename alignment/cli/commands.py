"""Dispatch of ``deepspeed-alignment COMMAND`` and its equivalents, ``python -m alignment`` and ``launch/COMMAND.py``.

Nothing here imports torch, so that ``--help`` and option errors appear immediately.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from alignment.cli.output import print_and_leave
from alignment.config.errors import did_you_mean


class Command(NamedTuple):
    """A command's module, whose ``main`` takes the arguments and the program name, and its line in ``--help``."""

    module: str
    help: str


COMMANDS = {
    "train": Command("alignment.cli.train", "train a model from a recipe, options, or both"),
    "prepare": Command("alignment.cli.prepare", "tokenize the data and print the plan of a run, without a GPU"),
    "status": Command("alignment.cli.status", "show the state of a run, read from its output folder"),
    "report": Command("alignment.cli.report", "write the HTML report of a run, or compare several runs"),
    "precompute": Command("alignment.cli.precompute", "compute and store the log-probs of the reference"),
    "export": Command(
        "alignment.cli.export", "export a checkpoint, or an adapter merged into its base, as a full model"
    ),
    "submit": Command("alignment.cli.submit", "submit a training job to SLURM that resumes after its time limit"),
}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment") -> None:
    """Run the command named by the first argument and exit with its status, or with 2 if it is unknown.

    Args:
        argv: arguments without the program name. Defaults to those of this process.
        program: program name in usage lines.
    """
    arguments = _without_local_rank(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in COMMANDS:
        import_module(COMMANDS[name].module).main(rest, f"{program} {name}")
    elif name in ("-h", "--help"):
        print_and_leave(_help(program))
    elif name == "--version":
        print_and_leave(f"deepspeed-alignment {_version()}")
    else:
        hint = did_you_mean(name, COMMANDS) or f"; did you mean {program} train {name}?"
        print(f"error: unknown command {name!r}{hint} Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)


def _without_local_rank(arguments: Sequence[str]) -> list[str]:
    """Drop the ``--local_rank`` that DeepSpeed's launcher puts before the command; the environment has it as well."""
    first = 0
    while first < len(arguments) and arguments[first].startswith(("--local_rank", "--local-rank")):
        first += 1 if "=" in arguments[first] else 2
    return list(arguments[first:])


def _help(program: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [ARGUMENT ...]",
            "",
            *lines,
            "",
            "Run COMMAND --help for the options of a command.",
        ]
    )


def _version() -> str:
    try:
        return version("deepspeed-alignment")
    except PackageNotFoundError:  # a checkout that is not installed
        import alignment

        return alignment.__version__
