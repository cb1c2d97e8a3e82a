"""The main function of a command: the first rank that fails reports why, and the others exit with its status."""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from alignment.cli.output import parse_arguments, surviving_closed_output
from alignment.config.options_training import FaultOptions
from alignment.engines.launch_env import hush_libraries, init_distributed
from alignment.run.activity import ACTIVITY
from alignment.run.ending import Ending, bounded, ending_of, record, write
from alignment.run.protection import Protection, ignore_stop_signals
from alignment.run.ranks import prepare_environment, rank, world_size
from alignment.run.stop import REQUESTS, RunStopped


def guarded(main: Callable[[], None], use_cpu: bool | Callable[[], bool] = False) -> int:
    """Run `main` and return the exit status; errors are reported in one line on stderr.

    The status is 0, 1 after an error, 85 if a launcher or a scheduler requested a stop, or 130 if the user did.

    With one process, neither torch nor DeepSpeed is imported here. With several, the process group is joined first, on
    the CPU with `use_cpu`, and after a failure on any rank, every rank exits without returning from this function.
    """
    hush_libraries()
    ACTIVITY.reset()
    ACTIVITY.guarded = True
    ending = Ending("", code=0)
    with surviving_closed_output(), Protection().active() as protection:
        try:
            prepare_environment()
            if world_size() > 1:
                # Below ERROR, torch's sockets write pages of C++ frames when a peer is lost.
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                init_distributed(use_cpu() if callable(use_cpu) else use_cpu)
                protection.watch_ranks()
            try:
                main()
            except RunStopped as error:
                if not REQUESTS.done:  # it was interrupted, maybe alone
                    raise
                ending = ending_of(error)
            except SystemExit as leaving:  # `sys.exit(0)`, as for `--help`, is not a failure, except within a run
                if leaving.code not in (None, 0) or ACTIVITY.folder is not None:
                    raise
            protection.leave()
        except BaseException as error:
            REQUESTS.done = True  # a launcher that ends all ranks must not interrupt the report
            ending = ending_of(error)
            if protection.peers is not None:
                protection.end(ending)
        if world_size() > 1 or ending.code == 85:
            # A launcher ends all ranks as soon as one has exited, and this one is about to exit anyway.
            ignore_stop_signals()
        if ending.line and (rank() == 0 or not ending.signal):
            write(ending.trace + ending.line)
        record(ending)
        deepspeed = sys.modules.get("deepspeed")
        if deepspeed is not None and deepspeed.comm.is_initialized():
            # Not torch's function: DeepSpeed's objects for this group would remain and break a later run here.
            bounded(deepspeed.comm.destroy_process_group, 30.0)
    ACTIVITY.reset()
    REQUESTS.forget()
    return ending.code


def run_alone(run: Callable[[Namespace], None], parser: ArgumentParser, argv: Sequence[str] | None) -> NoReturn:
    """Parse the arguments of a command for a single process, run it without a time limit, and exit.

    The status is that of :func:`guarded`, 1 also under a launcher, or 2 after a usage error.
    """
    given = parse_arguments(parser, argv)
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        reason = f"must run in a single process, but WORLD_SIZE is {ranks[:40]}; start it without a launcher"
        parser.exit(1, f"error: {parser.prog} {reason}\n")

    def job() -> None:
        ACTIVITY.limits = FaultOptions(hang_timeout=math.inf, hang_timeout_first=math.inf)  # no other rank waits
        run(given)

    sys.exit(guarded(job))
