"""One message, and every rank ends: the guard around a command's main function.

The first rank that fails claims the right to speak on the process group's store. The others fall silent, whatever
they were doing, let it write its line, and end. Only the command line is guarded; a caller of the Python API gets
exceptions. Under torchrun, torchrun's own report follows the message; `deepspeed` adds nothing to stderr of its own.

A rank that is killed from outside cannot speak. The others notice when they next meet it; until then only the launcher
does (`deepspeed` and `torchrun` end all ranks at once, `srun` does with --kill-on-bad-exit=1).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TextIO

from alignment.engines.failures import describe, exit_code, is_lost_peer
from alignment.engines.launch_env import init_distributed, prepare_environment, rank, world_size
from alignment.internals.torch import default_store
from alignment.internals.tqdm import open_bars

_POLL_S = 1.0  # how often a rank looks whether another has failed
_HUSH_S = 5.0  # how long the speaker waits for the others to fall silent
_SPEECH_S = 10.0  # how long a silent rank waits for the speaker
_LEAVE_S = 60.0  # how long rank 0 keeps the store for ranks that have finished too


def guarded(main: Callable[[], None], use_cpu: bool | Callable[[], bool] = False) -> int:
    """Run `main` and return the exit code: 0, 1 after an error, 130 after Ctrl-C. Errors become one line on stderr.

    With one process nothing else happens, and neither torch nor DeepSpeed is imported here. With several, the process
    group is joined first (on the CPU with `use_cpu`, which is called only then), `main` runs under a watch, and after
    a failure anywhere every rank ends by `os._exit`: this function then does not return.
    """
    peers: Peers | None = None
    try:
        prepare_environment()
        if world_size() > 1:
            # Below errors, torch's sockets write pages of C++ frames when a peer has gone.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            init_distributed(use_cpu() if callable(use_cpu) else use_cpu)
            peers = Peers()
        _run(main)
        if peers is not None:
            peers.finish()
        _leave_group()
        return 0
    except BaseException as error:
        if peers is not None:
            peers.fail(error)
        return _speak(error)


def _run(main: Callable[[], None]) -> None:
    """Run `main`; leaving by `sys.exit(0)`, as `--help` does, is no failure."""
    try:
        main()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


class Peers:
    """This rank's line to the others: a claim, who has fallen silent, who has finished.

    It has its own connection to the store: a poll must not wait behind the main thread's calls, nor they behind it.
    """

    def __init__(self) -> None:
        from torch.distributed import PrefixStore, TCPStore

        # Rank 0's store may serve the group, and must outlive a main function that destroys the group.
        self._server = default_store()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with _interrupt_deferred():
            client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        # torchrun keeps one store over its restarts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"alignment.guard/{attempt}", client)
        self._lock = threading.Lock()
        self._last_word = threading.Lock()
        self._own_end = False
        threading.Thread(target=self._watch, name="alignment-guard", daemon=True).start()

    def finish(self) -> None:
        """Wait until every rank has finished. Rank 0, which may hold the store, goes last."""
        count = self._call("add", "finished", 1)
        while count < world_size():
            time.sleep(0.1)
            count = self._call("add", "finished", 0)
        with self._lock:
            self._own_end = True
        if rank() != 0:
            self._call("add", "left", 1)
            return
        self._wait(lambda: self._call("add", "left", 0) >= world_size() - 1, _LEAVE_S)

    def fail(self, error: BaseException) -> NoReturn:
        """Speak if no other rank does, and end this process."""
        code = exit_code(error)
        if is_lost_peer(error):
            # The rank that broke the connection knows why; leave it time to say so.
            self._wait(lambda: self._call("check", ["claim"]), _SPEECH_S / 2)
        with self._lock:
            self._own_end = True
        if self._call("add", "claim", 1) > 1:
            self._end_silently()
        if not isinstance(error, KeyboardInterrupt):  # then a launcher is about to end all ranks
            others = [f"silent/{other}" for other in range(world_size()) if other != rank()]
            self._wait(lambda: self._call("check", others), _HUSH_S)
        _speak(error)
        self._call("set", "said", "1")
        _end_process(code)

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            with self._lock:
                if self._own_end:
                    return
                # Under the lock: a claim made by this rank's main thread must not be taken for another's.
                claimed = self._call("check", ["claim"])
            if claimed:
                self._end_silently()

    def _end_silently(self) -> NoReturn:
        """Close stdout and stderr, wait for the speaker to have spoken, and end.

        The second of grace lets the speaker be the first to exit: a launcher that ends all at the first exit, or
        reports the first as the cause, then takes the right one.
        """
        _mute()
        self._call("set", f"silent/{rank()}", "1")
        self._wait(lambda: self._call("check", ["said"]), _SPEECH_S)
        time.sleep(1.0)
        _end_process(1)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not reached() and time.monotonic() < end:
            time.sleep(0.1)

    def _call(self, method: str, *arguments: Any) -> Any:
        """A call to the store; without the store there is no run left, and this process ends."""
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError:
            self._last_word.acquire()  # never released: of the two threads, one writes and ends the process
            if not self._own_end and rank() == 1:
                _write(
                    "error: rank 1: rank 0 has gone without a message: it was killed, perhaps for lack of host memory"
                )
            _end_process(1)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Within this context Ctrl-C has to wait.

    A connection that it breaks off would be tried again by torch, up to 30 s later, and be deaf to it until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _speak(error: BaseException) -> int:
    """Write what happened to stderr, its last line beginning with `error: `, and return the exit code."""
    line, is_defect = describe(error)
    trace = "".join(traceback.format_exception(error)) if is_defect else ""
    if line:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        who = f"rank {os.environ.get('RANK', '?')}: " if several else ""
        # Another rank's progress bar may have left the cursor in the middle of a line.
        _write(("\n" if several else "") + trace + f"error: {who}{line}")
    return exit_code(error)


def _write(text: str) -> None:
    """Write `text` to stderr as whole lines in one call, after closing this process's progress bars.

    An open bar leaves the cursor within a line, and draws itself once more as the interpreter ends.
    """
    for bar in open_bars():
        bar.close()
    _flush(sys.stdout)
    sys.stderr.write(text + "\n")
    _flush(sys.stderr)


def _flush(stream: TextIO) -> None:
    # A reader who has gone (`| head`) must not keep the error from stderr, nor a process from ending.
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def _mute() -> None:
    """Send stdout and stderr to nowhere at the level of the process, so that libraries in C++ are silent too."""
    _flush(sys.stdout)
    _flush(sys.stderr)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _end_process(code: int) -> NoReturn:
    """End without waiting for blocked threads, and take forked workers along: alone they would wait forever."""
    import psutil

    own = psutil.Process()
    for child in own.children(recursive=True):
        try:
            # Only Python workers: a reporting service may still have to send what it holds.
            if child.exe() == own.exe():
                child.terminate()
        except psutil.Error:
            continue
    _flush(sys.stdout)
    _flush(sys.stderr)
    os._exit(code)


def _leave_group() -> None:
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        # Not torch's function: what DeepSpeed made of this group would stay, and fail a later run in this process.
        deepspeed.comm.destroy_process_group()
