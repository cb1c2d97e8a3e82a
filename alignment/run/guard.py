"""The guard around a command's main function: one error message, and every rank exits.

The first rank that fails claims the right to report. The others fall silent, whatever they are doing, let it write its
line, and exit with the same status. The guard also turns signals into stop requests, and ends a job whose ranks have
died, are silent or hang. Only the command line is guarded; callers of the Python API get exceptions. Under torchrun,
torchrun's own report follows the message; `deepspeed` adds nothing to stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

from alignment.engines.launch_env import init_distributed
from alignment.internals.torch import default_store
from alignment.run.activity import ACTIVITY
from alignment.run.beats import Pulse
from alignment.run.ending import end_within, write, write_beside_bars
from alignment.run.failures import describe, exit_code, is_lost_peer
from alignment.run.last_word import LastWord, Verdict, record
from alignment.run.launchers import orphaned
from alignment.run.lines import hung_line
from alignment.run.peers import Peers
from alignment.run.ranks import prepare_environment, rank, world_size
from alignment.run.requests import REQUESTS
from alignment.run.signals import STOP_SIGNALS, SignalWatch, ignore_stop_signals
from alignment.run.stop import RunStopped, StopReason

_WAY_OUT_S = 30.0  # for a rank to exit once all have finished, with signals ignored
_RECORD_S = 20.0  # of these, for writing the last status
_FOR_EVER = timedelta(days=1)  # an unresponsive store is detected by the clock, not by torch


def guarded(main: Callable[[], None], use_cpu: bool | Callable[[], bool] = False) -> int:
    """Run `main` and return the exit status; errors are reported in one line on stderr.

    The status is 0, 1 after an error, 85 if a launcher or a scheduler requested a stop, or 130 if the user did.

    With one process, neither torch nor DeepSpeed is imported here. With several, the process group is joined first (on
    the CPU with `use_cpu`, which is called only then), and `main` runs under supervision. After a failure on any rank,
    every rank exits through `os._exit`, so this function does not return.
    """
    guard = _Guard()
    ACTIVITY.reset()
    ACTIVITY.guarded = True
    with guard.signals.listening():
        code = guard.run(main, use_cpu)
    ACTIVITY.reset()
    REQUESTS.forget()
    return code


class _Guard:
    """Supervises one call of :func:`guarded`.

    Attributes:
        peers: the other ranks, once all have joined; None in a single process.
        signals: receives signals.
    """

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.signals = SignalWatch(REQUESTS, self.end_now, tell=_tell, each_tick=self._tick)
        self._over = threading.Event()

    def run(self, main: Callable[[], None], use_cpu: bool | Callable[[], bool]) -> int:
        """Implement :func:`guarded`."""
        try:
            if orphaned():
                self.signals.lost("its launcher has exited")
            prepare_environment()
            if world_size() > 1:
                # Below ERROR, torch's sockets write pages of C++ frames when a peer is lost.
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                init_distributed(use_cpu() if callable(use_cpu) else use_cpu)
                self.peers = _peers(self.signals)
                threading.Thread(target=REQUESTS.look_until, args=(self._over,), daemon=True).start()
            stopped = _run(main)
            with REQUESTS.deferred(None):
                self._finish(0 if stopped is None else stopped.reason.code)
                if stopped is not None and rank() == 0:
                    write(stopped.message)
                elif stopped is None:
                    record("", Verdict(code=0, state="finished"), _RECORD_S)
                _leave_group()
            return 0 if stopped is None else stopped.reason.code
        except BaseException as error:
            return self._fail(error)
        finally:
            self._over.set()

    def _finish(self, code: int) -> None:
        """Wait for the other ranks, and make sure that this one exits: it is no longer supervised."""
        REQUESTS.done = True
        if self.peers is None:
            return
        self.peers.finish()
        # A launcher ends all ranks as soon as one has exited, and this one is about to exit anyway.
        ignore_stop_signals()
        end_within(_WAY_OUT_S, code)

    def _fail(self, error: BaseException) -> int:
        """Report the error and return the exit status; with other ranks, tell them and exit."""
        REQUESTS.done = True  # a launcher that ends all ranks must not interrupt the last word
        line, trace = _said(error)
        verdict = _verdict(error)
        if self.peers is not None:
            by_user = verdict.signal == StopReason.SIGINT.name  # then a launcher is about to end all ranks
            self.peers.fail(line, verdict, trace=trace, lost=is_lost_peer(error), at_once=by_user)
        if line:
            # Another rank's progress bar may have left the cursor in the middle of a line.
            write(("\n" if os.environ.get("WORLD_SIZE", "1") != "1" else "") + trace + line)
        record(line, verdict)
        return verdict.code

    def end_now(self, reason: StopReason) -> NoReturn:
        """Exit on every rank immediately; called in the thread that receives signals."""
        line = f"{reason.state} immediately by {reason.name} in phase {ACTIVITY.phase} after step {ACTIVITY.step}"
        verdict = Verdict(code=reason.code, state=reason.state, signal=reason.name)
        self._end(line, verdict)

    def _end(self, line: str, verdict: Verdict) -> NoReturn:
        """Exit from the thread that receives signals: the main thread may be blocked forever."""
        if self.peers is not None and not self.peers.alone:
            self.peers.fail(line, verdict, at_once=True)
        LastWord(None, rank()).speak(line, verdict)

    def _tick(self) -> None:
        if self.peers is not None:
            self.peers.tick()
        else:
            ACTIVITY.tick()
        if (self.peers is None or self.peers.alone) and ACTIVITY.idle > ACTIVITY.limit:
            self._end(hung_line(rank(), Pulse().beat(), 1), Verdict(hung=True))


def _tell(text: str) -> None:
    if rank() == 0:
        write_beside_bars(text)


def _run(main: Callable[[], None]) -> RunStopped | None:
    """Run `main`; `sys.exit(0)`, as for `--help`, is not a failure, and neither is a stop of all ranks."""
    try:
        main()
    except RunStopped as stopped:
        if stopped.everywhere:
            return stopped
        raise
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    return None


def _peers(signals: SignalWatch) -> Peers:
    """Connect to the other ranks over a separate connection, so that polling never waits for the main thread."""
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with _signals_deferred():
        client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        client.set_timeout(_FOR_EVER)
    # torchrun keeps one store across its restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"alignment.guard/{attempt}", client)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Rank 0's store may serve the group, and must outlive a main function that destroys the group.
    return Peers(
        store,
        rank(),
        world_size(),
        server=default_store(),
        lost_store=signals.lost if by_launcher else None,
        launcher_stopped=signals.launcher_stopped,
    )


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Within this context, signals are blocked.

    torch would retry a connection that a signal interrupts for up to 30 s, and ignore signals meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _said(error: BaseException) -> tuple[str, str]:
    """The line for an error, with the prefix `error: ` unless it is a stop, and its traceback if it is a bug."""
    if isinstance(error, RunStopped):
        return error.message, ""
    line, is_defect = describe(error)
    if not line:
        return "", ""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"rank {os.environ.get('RANK', '?')}: " if several else ""
    return f"error: {who}{line}", "".join(traceback.format_exception(error)) if is_defect else ""


def _verdict(error: BaseException) -> Verdict:
    reason = error.reason if isinstance(error, RunStopped) else None
    if isinstance(error, KeyboardInterrupt):
        reason = StopReason.SIGINT
    if reason is not None:
        return Verdict(code=reason.code, state=reason.state, signal=reason.name)
    return Verdict(code=exit_code(error))


def _leave_group() -> None:
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        # Not torch's function: DeepSpeed's objects for this group would remain and break a later run in this process.
        deepspeed.comm.destroy_process_group()
