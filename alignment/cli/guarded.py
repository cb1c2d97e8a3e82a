"""The main function of a command: the first rank that fails reports why, and the others exit with its status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from alignment.cli.output import surviving_closed_output
from alignment.engines.launch_env import hush_libraries, init_distributed
from alignment.run.ending import Ending, bounded, ending_of, record, write
from alignment.run.protection import ignore_stop_signals, protecting_command
from alignment.run.ranks import prepare_environment, rank, world_size
from alignment.run.stop import REQUESTS, RunStopped

_LEAVE_S, _RECORD_S = 30.0, 20.0  # to leave the process group; to write the last status


def guarded(main: Callable[[], None], use_cpu: bool | Callable[[], bool] = False) -> int:
    """Run `main` and return the exit status; errors are reported in one line on stderr.

    The status is 0, 1 after an error, 85 if a launcher or a scheduler requested a stop, or 130 if the user did.

    With one process, neither torch nor DeepSpeed is imported here. With several, the process group is joined first, on
    the CPU with `use_cpu`, and after a failure on any rank, every rank exits without returning from this function.
    """
    hush_libraries()
    with surviving_closed_output(), protecting_command() as protection:
        try:
            prepare_environment()
            if world_size() > 1:
                # Below ERROR, torch's sockets write pages of C++ frames when a peer is lost.
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                init_distributed(use_cpu() if callable(use_cpu) else use_cpu)
                protection.watch_ranks()
            stopped = None
            try:
                main()
            except RunStopped as error:
                stopped = error
            except SystemExit as leaving:  # `sys.exit(0)`, as for `--help`, is not a failure
                if leaving.code not in (None, 0):
                    raise
            REQUESTS.done = True
            if protection.peers is not None:
                protection.leave()
                # A launcher ends all ranks as soon as one has exited, and this one is about to exit anyway.
                ignore_stop_signals()
            if stopped is None:
                record(Ending("", code=0, state="finished"), _RECORD_S)
            elif rank() == 0:
                write(stopped.message)
            deepspeed = sys.modules.get("deepspeed")
            if deepspeed is not None and deepspeed.comm.is_initialized():
                # Not torch's function: DeepSpeed's objects for this group would remain and break a later run here.
                bounded(deepspeed.comm.destroy_process_group, _LEAVE_S)
            return 0 if stopped is None else stopped.reason.code
        except BaseException as error:
            REQUESTS.done = True  # a launcher that ends all ranks must not interrupt the report
            ending = ending_of(error)
            if protection.peers is not None:
                protection.peers.end(ending)
            if ending.line:
                write(ending.trace + ending.line)
            record(ending)
            return ending.code
