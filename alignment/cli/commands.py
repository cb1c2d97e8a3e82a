"""The commands: ``deepspeed-alignment COMMAND``, ``python -m alignment COMMAND`` and ``launch/COMMAND.py`` are one.

Nothing here imports torch: ``--help`` and the errors of options answer at once.
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
    """Where a command's function is (it takes the arguments and the name it was called by), and what it does."""

    module: str
    help: str


COMMANDS = {
    "train": Command("alignment.cli.train", "train a model from a recipe, options, or both"),
    "prepare": Command("alignment.cli.prepare", "tokenise the data and plan a run without a GPU, and exit"),
    "status": Command("alignment.cli.status", "show where a run stands, from the files in its output folder"),
    "report": Command("alignment.cli.report", "draw the HTML report of a run, or compare several runs"),
    "precompute": Command("alignment.cli.precompute", "compute and keep the reference's log-probs, and exit"),
    "export": Command("alignment.cli.export", "write a checkpoint, or an adapter with its base, as a full model"),
    "submit": Command("alignment.cli.submit", "submit training to SLURM, which requeues it near its time limit"),
}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment") -> None:
    """Run the command that the first argument names, and exit with its code; 2 where there is no such command.

    Args:
        argv: arguments without the program's name; those of this process when None.
        program: what usage lines call this program.
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
        print(f"error: {name!r}: no such command{hint} Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)


def _without_local_rank(arguments: Sequence[str]) -> list[str]:
    """The arguments without what DeepSpeed's launcher puts before the command; the environment says the same."""
    first = 0
    while first < len(arguments) and arguments[first].startswith(("--local_rank", "--local-rank")):
        first += 1 if "=" in arguments[first] else 2
    return list(arguments[first:])


def _help(program: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {program} COMMAND [ARGUMENT ...]", "", *lines, "", "COMMAND --help lists its options."])


def _version() -> str:
    try:
        return version("deepspeed-alignment")
    except PackageNotFoundError:  # a checkout that was not installed
        import alignment

        return alignment.__version__
