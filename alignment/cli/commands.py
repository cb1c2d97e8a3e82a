"""Dispatch of ``deepspeed-alignment COMMAND`` and its equivalents, ``python -m alignment`` and ``launch/COMMAND.py``.

Nothing here imports torch, so that ``--help`` and option errors appear immediately.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import alignment
from alignment.cli.output import print_and_leave
from alignment.cli.parsing import without_local_rank
from alignment.config.errors import did_you_mean

# The commands with their lines in `--help`. Each is a module of this package.
COMMANDS = {
    "train": "train a model from a recipe, options, or both",
    "prepare": "tokenize the data and print the plan of a run, without a GPU",
    "plan": "calculate the memory that a run needs, by phase and part",
    "status": "show the state of a run, read from its output folder",
    "report": "write the HTML report of a run, or compare several runs",
    "precompute": "compute and store the log-probs of the reference",
    "sample": "write a model's completions for prompts as rows to train on",
    "compare": "count how often a model's answers are better than those of other models",
    "vllm-serve": "print the command of the vLLM server that generates for a recipe, or run it",
    "export": "export a checkpoint, or an adapter merged into its base, as a full model",
    "chat": "chat with a trained model, alone or beside another one",
    "submit": "submit a training job to SLURM that resumes after its time limit",
}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment") -> None:
    """Run the command named by the first argument and exit with its status, or with 2 if it is unknown."""
    arguments = list(without_local_rank(sys.argv[1:] if argv is None else argv))
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in COMMANDS:
        import_module(f"alignment.cli.{name.replace('-', '_')}").main(rest, f"{program} {name}")
    elif name in ("-h", "--help"):
        lines = [f"  {name.ljust(max(map(len, COMMANDS)))}  {text}" for name, text in COMMANDS.items()]
        usage, further = f"usage: {program} COMMAND [ARGUMENT ...]", "Run COMMAND --help for the options of a command."
        print_and_leave("\n".join([usage, "", *lines, "", further]))
    elif name == "--version":
        print_and_leave(f"deepspeed-alignment {alignment.__version__}")
    else:
        hint = did_you_mean(name, COMMANDS) or f"; did you mean {program} train {name}?"
        print(f"error: unknown command {name!r}{hint} Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
