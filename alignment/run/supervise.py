"""Run a server beside the run, and end all of its processes once it exits or the run is gone.

A program, ``python supervise.py PID GRACE COMMAND...``, that imports the standard library only. It is the parent of
the server because a run can end without executing any code: by SIGKILL, or ``os._exit`` while a thread hangs. A signal
on the death of the parent (``PR_SET_PDEATHSIG``) alone is not sufficient: it is sent as soon as the thread ends that
started the child, and reaches only the first of its processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_TICK_S = 0.5  # between two looks whether the run is still there
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def supervise(run: int, grace: float, command: list[str]) -> int:
    """Run the command until it exits, the process ``run`` is gone, or this one is told to stop; return its status.

    Processes that remain after ``grace`` seconds are killed.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes of the server whose parent has died become our children
    server = os.fork()
    if server == 0:
        try:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # if this process is killed; it has a single thread
            os.execvp(command[0], command)
        except BaseException as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, signal.SIGCHLD})
    statuses: dict[int, int] = {}
    while server not in statuses and os.getppid() == run and _reap(statuses):
        received = signal.sigtimedwait({*_STOP, signal.SIGCHLD}, _TICK_S)
        if received is not None and received.si_signo in _STOP:
            break
    os.killpg(0, signal.SIGTERM)  # blocked here
    deadline = time.monotonic() + grace
    while _reap(statuses) and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, _TICK_S)
    if _reap(statuses):
        os.killpg(0, signal.SIGKILL)  # this process as well
    code = os.waitstatus_to_exitcode(statuses.get(server, 0))
    return code if code >= 0 else 128 - code  # as shells do after a signal


def _reap(statuses: dict[int, int]) -> bool:
    """Add the statuses of children that have exited; return whether others remain."""
    try:
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return True
            statuses[child] = status
    except ChildProcessError:
        return False


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
