"""The ``prepare`` command: takes the options of ``train``, tokenizes the data and prints the plan of the run.

It needs no GPU and loads no weights, so that a job on a CPU node can run it before the training job starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from alignment.cli.guarded import guarded
from alignment.cli.parsing import Parser, gigabytes, glimpse
from alignment.cli.train import read_options
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import OptionError, setting
from alignment.engines.start_up import old_objects_spared, uncollected
from alignment.planning.gpu_terms import usable_bytes
from alignment.run.ranks import world_size

_ABOUT = """\
Tokenize the data of a run and print its plan, without a GPU and without loading weights. The run reads the tokenized
rows from the cache of the datasets library. Takes the options of `train` and:

  --ranks N         number of ranks to plan for [1]
  --gpu_memory GB   memory of each rank's GPU, as it is sold [24]
"""
_RANKS = "--ranks"
_DEVICE = "DS_ACCELERATOR"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment prepare") -> None:
    """Tokenize the data, print the plan for ``--ranks N``, and exit with the same statuses as ``train``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(lambda: _run(arguments, program), use_cpu=True))


def _run(arguments: list[str], program: str) -> None:
    if world_size() > 1:
        raise OptionError(
            f"{program} must run in a single process, but WORLD_SIZE is {world_size()}; start it without a launcher "
            f"and pass {_RANKS} {world_size()}"
        )
    given, arguments = ranks_parser(program).parse_known_args(arguments)
    if given.ranks < 1:
        raise OptionError(f"{setting(_RANKS, given.ranks)}: expected the number of ranks, 1 or more")
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_ABOUT, flush=True)
    on_cpu = glimpse(arguments).use_cpu or os.environ.get(_DEVICE, "").lower() == "cpu"
    os.environ[_DEVICE] = "cpu"  # do not use a GPU of this machine
    machine = Machine(given.ranks, cuda=not on_cpu, card=usable_bytes(given.gpu_memory))
    with planning_for(machine):
        with uncollected():
            options = read_options(arguments, program, use_cpu=True)
            options.dry_run = True
            from alignment.cli.train_job import prepare
        with old_objects_spared():
            prepare(options, machine)


def ranks_parser(program: str) -> Parser:
    """Return a parser of the options that ``train`` does not have."""
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument(_RANKS, type=int, default=1)
    parser.add_argument("--gpu_memory", type=gigabytes, default=24.0)
    return parser
