"""One message, and every rank ends: the guard around a command's main function.

The first rank that fails claims the right to speak. The others fall silent, whatever they were doing, let it write its
line, and end with the same exit status. The guard also turns signals into requests to stop, and ends a job whose ranks
have died, fallen silent or hang. Only the command line is guarded; a caller of the Python API gets exceptions. Under
torchrun, torchrun's own report follows the message; `deepspeed` adds nothing to stderr of its own.
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

from alignment.engines.failures import describe, exit_code, is_lost_peer
from alignment.engines.launch_env import init_distributed, prepare_environment, rank, world_size
from alignment.engines.watch.beats import Pulse
from alignment.engines.watch.ending import end_within, write, write_beside_bars
from alignment.engines.watch.last_word import LastWord, Verdict, record
from alignment.engines.watch.launchers import orphaned
from alignment.engines.watch.lines import hung_line
from alignment.engines.watch.peers import Peers
from alignment.engines.watch.requests import REQUESTS
from alignment.engines.watch.signals import STOP_SIGNALS, SignalWatch, ignore_stop_signals
from alignment.engines.watch.stop import RunStopped, StopReason
from alignment.internals.torch import default_store
from alignment.reporting.activity import ACTIVITY

_WAY_OUT_S = 30.0  # that a rank has to end once all have finished, with signals ignored
_RECORD_S = 20.0  # of it, for the disk to take the last status
_FOR_EVER = timedelta(days=1)  # a store that does not answer is noticed by the clock, not by torch


def guarded(main: Callable[[], None], use_cpu: bool | Callable[[], bool] = False) -> int:
    """Run `main` and return the exit status; errors become one line on stderr.

    0, 1 after an error, 85 where a launcher or a scheduler asked the run to stop, 130 where a person did.

    With one process neither torch nor DeepSpeed is imported here. With several, the process group is joined first (on
    the CPU with `use_cpu`, which is called only then), `main` runs under a watch, and after a failure anywhere every
    rank ends by `os._exit`: this function then does not return.
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
    """What watches over one call of :func:`guarded`.

    Attributes:
        peers: the other ranks, once all have met; None in a single process.
        signals: where signals arrive.
    """

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.signals = SignalWatch(REQUESTS, self.end_now, tell=_tell, each_tick=self._tick)
        self._over = threading.Event()

    def run(self, main: Callable[[], None], use_cpu: bool | Callable[[], bool]) -> int:
        """As :func:`guarded`."""
        try:
            if orphaned():
                self.signals.lost("its launcher has ended")
            prepare_environment()
            if world_size() > 1:
                # Below errors, torch's sockets write pages of C++ frames when a peer has gone.
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
        """Wait for the other ranks, and see that this one ends: nobody watches it any more."""
        REQUESTS.done = True
        if self.peers is None:
            return
        self.peers.finish()
        # A launcher ends all ranks as soon as one has exited, and this one is about to do so by itself.
        ignore_stop_signals()
        end_within(_WAY_OUT_S, code)

    def _fail(self, error: BaseException) -> int:
        """Say what happened, here or to the other ranks, and return the exit status; with other ranks, end."""
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
        """End every rank in the middle of whatever it does; called in the thread that hears signals."""
        line = f"{reason.state} by {reason.name} at once, in phase {ACTIVITY.phase} after step {ACTIVITY.step}"
        verdict = Verdict(code=reason.code, state=reason.state, signal=reason.name)
        self._end(line, verdict)

    def _end(self, line: str, verdict: Verdict) -> NoReturn:
        """In the thread that hears signals: the main thread may never get on."""
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
    """Run `main`; leaving by `sys.exit(0)`, as `--help` does, is no failure, and neither is a stop of all ranks."""
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
    """The other ranks, over a connection of their own: a poll must not wait behind the main thread's calls."""
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with _signals_deferred():
        client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        client.set_timeout(_FOR_EVER)
    # torchrun keeps one store over its restarts.
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
    """Within this context signals have to wait.

    A connection that one breaks off would be tried again by torch, up to 30 s later, and be deaf to it until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _said(error: BaseException) -> tuple[str, str]:
    """What is written of an error: its line, which begins with `error: ` unless it is a stop, and its traceback."""
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
        # Not torch's function: what DeepSpeed made of this group would stay, and fail a later run in this process.
        deepspeed.comm.destroy_process_group()
