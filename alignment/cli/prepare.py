"""The ``prepare`` command: takes the options of ``train``, tokenizes the data and prints the plan of the run.

It needs no GPU and loads no weights, so that a job on a CPU node can run it before the training job starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from alignment.cli.guarded import guarded
from alignment.cli.output import surviving_closed_output
from alignment.cli.parsing import Parser, glimpse, parse
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import OptionError, setting
from alignment.config.registry import METHODS
from alignment.engines.garbage import old_objects_spared, uncollected
from alignment.engines.launch_env import hush_libraries, init_distributed
from alignment.engines.start_up import import_libraries
from alignment.run.ranks import world_size

_ABOUT = """\
Tokenize the data of a run and print its plan, without a GPU and without loading weights. The run reads the tokenized
rows from the cache of the datasets library. Takes the options of `train` and:

  --ranks N   number of ranks to plan for [1]
"""
_RANKS = "--ranks"
_DEVICE = "DS_ACCELERATOR"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment prepare") -> None:
    """Tokenize the data, print the plan, and exit with the same statuses as ``train``.

    Args:
        argv: arguments without the program name: those of ``train`` and ``--ranks N``, the number of ranks to plan
            for. Defaults to those of this process.
        program: program name in usage lines.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    hush_libraries()
    with surviving_closed_output(), contextlib.ExitStack() as starting:
        starting.enter_context(uncollected())
        code = guarded(lambda: _run(arguments, program, starting.close), use_cpu=True)
    sys.exit(code)


def _run(arguments: list[str], program: str, started: Callable[[], None]) -> None:
    if world_size() > 1:
        raise OptionError(
            f"{program} must run in a single process, but WORLD_SIZE is {world_size()}; start it without a launcher "
            f"and pass {_RANKS} {world_size()}"
        )
    given, arguments = _ranks_parser(program).parse_known_args(arguments)
    if given.ranks < 1:
        raise OptionError(f"{setting(_RANKS, given.ranks)}: expected the number of ranks, 1 or more")
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_ABOUT, flush=True)
    before = glimpse(arguments)
    on_cpu = before.use_cpu or os.environ.get(_DEVICE, "").lower() == "cpu"
    os.environ[_DEVICE] = "cpu"  # do not use a GPU of this machine
    machine = Machine(given.ranks, cuda=not on_cpu)
    with planning_for(machine):
        if METHODS.is_outside(before.method):
            init_distributed(True)  # the method's module imports torch and DeepSpeed
            import_libraries()
        options = parse(arguments, program)
        options.dry_run = True
        init_distributed(True)
        import_libraries()
        from alignment.cli.train_job import prepare

        started()
        with old_objects_spared():
            prepare(options, machine)


def _ranks_parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument(_RANKS, type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
