"""Describe an error in one line for the user, and end this process with it, whatever disk or terminal hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import psutil

from alignment.config.errors import AlignmentError
from alignment.internals.process_end import open_bars
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import rank, world_size
from alignment.run.stop import RunStopped, StopReason

Result = TypeVar("Result")
STACKS = "hang-"  # prefix of the files with stack traces
_WRITE_S = 2.0  # limit for a write to a terminal or a disk
_REPORT_S = 10.0  # that the status and the report of a failed run may take
_LONGEST_S = 25.0  # limit for everything before the exit
_LATER_S = 2.0  # a launcher that reports the first exit as the cause should pick the rank that writes the line
_MONTH_S = 30 * 86400.0  # the longest time of the dead-man switch
# Errors of connections between ranks, by gloo and NCCL; op.preamble: the ranks disagree about the size of a tensor.
_LOST = re.compile(
    r"^Dist(Store|Network)Error|gloo/transport/(?!.*op\.preamble)|Gloo connectFullMesh|"
    r"NCCL.*(remote process|ncclRemoteError|ncclSystemError)|NCCL communicator was aborted",
    re.DOTALL,
)
_NOISE = re.compile(r"\[[^\]]*\.(cc|h):\d+\] |NCCL error in: \S+, |\. This is typically.*|Exception raised from.*")
_DISK_FULL = re.compile("No space left on device|Disk quota exceeded|PytorchStreamWriter failed")
# What uses less memory on a GPU if it cannot be planned: what leaves the result as it is comes first.
LESS_MEMORY = (
    "set auto_find_batch_size to true, or a smaller per_device_train_batch_size and a larger "
    "gradient_accumulation_steps",
    "set gradient_checkpointing to true, or pass a DeepSpeed file that offloads",
    "set a smaller max_length",
)
# What to do about an error, by its class and message. A data loader worker is killed, or exits unexpectedly.
_ADVICE = {
    "OutOfMemoryError": f"the GPU is out of memory: {'; '.join(LESS_MEMORY)}",
    "MemoryError|DefaultCPUAllocator": "the host is out of memory: offload less, use a smaller model or more ranks",
    "DataLoader worker": "the host may have run out of memory: set dataloader_num_workers to 0",
    "DistBackendError": "NCCL failed: set NCCL_DEBUG=INFO in the environment for details",
    r"^wandb\.": "report_to: wandb failed: run `wandb login`, set WANDB_MODE=offline, or set report_to to none",
}


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of ``call``, or raise its exception; after ``seconds``, abandon it with a TimeoutError."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """Return the result of one of the last calls before an exit; None if it exceeds ``seconds`` or raises."""
    with contextlib.suppress(Exception):  # nothing can be done about it
        return within(seconds, call)
    return None


class OtherRankFailed(AlignmentError):
    """Another rank has failed, and reports why."""


def describe(error: BaseException) -> tuple[str, bool]:
    """Return one line for the user, and whether the error is a bug whose traceback is worth showing.

    The line is empty for a `SystemExit` with a status, whose message has already been written.
    """
    text, lost = reason_of(error), lost_peer(error)
    if isinstance(error, AlignmentError):
        return " ".join(str(error).split()), False
    if lost is not None:
        what = "another rank exited without reporting an error, or the network to it is down"
        return f"{what} ({reason_of(lost)})", False
    if isinstance(error, SystemExit):
        return (text if isinstance(error.code, str) else "" if error.code else "exited with status 0"), False
    named = f"{type(error).__name__}: {text}"
    for pattern, advice in _ADVICE.items():
        if re.search(pattern, f"{type(error).__module__}.{named}"):
            return f"{advice} ({text})", False
    for each in causes(error):
        if _DISK_FULL.search(str(each)):
            what = f"{getattr(each, 'filename', None) or 'a file'} could not be written because the disk is full"
            return f"{what}; free some space, or set output_dir to a folder on another disk", False
    if isinstance(error, OSError):
        return (f"{error.filename}: {error.strerror}" if error.filename else error.strerror or text), False
    return f"{named} (this is a bug; please report it with the traceback)", True


def lost_peer(error: BaseException) -> BaseException | None:
    """Return an error of a lost connection to another rank, which is this one or a cause of it."""
    found = [each for each in causes(error) if isinstance(each, RuntimeError)]
    return next((each for each in found if _LOST.search(f"{type(each).__name__}: {each}")), None)


def reason_of(error: BaseException) -> str:
    """The message of a library's error in one line, without tracebacks of workers, source locations and advice."""
    text = str(error)
    if "Original Traceback" in text:  # of an error in a data loader worker; the last line is the error
        text = text.strip().splitlines()[-1]
    text = _NOISE.sub("", " ".join(text.split())).strip()
    return text if len(text) <= 300 else text[:299] + "…"


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, each once, including those hidden by ``raise … from None``."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@dataclass(frozen=True)
class Ending:
    """Why a job ends, as its ranks tell each other."""

    line: str  # message for the user
    code: int = 1  # exit status of every rank
    signal: str | None = None  # the name of a request to stop
    stacks: bool = False  # whether every rank writes its stack traces
    trace: str = ""  # the traceback of a bug, which precedes the line
    lost: bool = False  # whether a connection to another rank broke, whose end may be noticed later
    grace: float = 0.0  # seconds in which other ranks may still end by themselves


def ending_of(error: BaseException) -> Ending:
    """Return why a job ends with this error."""
    if isinstance(error, RunStopped):
        return Ending(error.message, error.reason.code, error.reason.name)
    if isinstance(error, KeyboardInterrupt):
        return Ending("error: interrupted by the user", StopReason.SIGINT.code, StopReason.SIGINT.name)
    line, is_bug = describe(error)
    if line:
        where = "" if isinstance(error, AlignmentError) else f" in {ACTIVITY.place}"  # its message says where
        line = f"error: rank {rank()}{where}: {line}" if world_size() > 1 else f"error: {line}"
    # A process has 256 exit statuses, and the run has failed with each of them.
    code = error.code & 0xFF or 1 if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    trace = "".join(traceback.format_exception(error)) if is_bug else ""
    return Ending(line, code, trace=trace, lost=isinstance(error, OtherRankFailed) or lost_peer(error) is not None)


def end_with(ending: Ending, *, speaks: bool = True, last: Callable[[], None] = lambda: None) -> NoReturn:
    """Exit as the ending says, after a call of ``last``; without ``speaks``, another rank writes the line."""

    def report() -> None:
        write(ending.trace + ending.line if speaks else "")
        if ending.stacks:
            write_stacks()
        bounded(last, _REPORT_S)
        record(ending)
        time.sleep(0.0 if speaks else _LATER_S)
        own = psutil.Process()
        for child in own.children(recursive=True):  # forked workers, which would otherwise wait forever
            with contextlib.suppress(psutil.Error, OSError):
                # Not a reporting service, which may still have data to send, or a server that ends in its own way.
                if child.exe() == own.exe() and os.getsid(child.pid) == os.getsid(0):
                    child.kill()

    try:
        bounded(report, _LONGEST_S)
    finally:
        os._exit(ending.code)


def record(ending: Ending) -> None:
    """Record in ``status.json`` how the run ended, if this process writes that file and the disk responds."""
    status = ACTIVITY.status
    if status is None:
        return
    state = StopReason[ending.signal].state if ending.signal else "failed" if ending.code else "finished"
    error = (ending.line.removeprefix("error: ") or f"exit status {ending.code}") if state == "failed" else None
    bounded(lambda: status.update(state=state, signal=ending.signal, error=error), _REPORT_S)
    if error and not ending.stacks and ACTIVITY.at_failure is not None:
        bounded(ACTIVITY.at_failure, _REPORT_S)


@contextlib.contextmanager
def ending_in_status() -> Iterator[None]:
    """Record in the status how the body ends, and write the report of a failure, unless a guard does."""
    if ACTIVITY.guarded:
        yield
        return
    ending = Ending("", code=0)
    try:
        yield
    except BaseException as error:
        ending = ending_of(error)
        raise
    finally:
        record(ending)  # no effect if the end has been recorded
        if ACTIVITY.status is not None:
            ACTIVITY.status.close()
        ACTIVITY.status = ACTIVITY.at_failure = None


def write(text: str) -> None:
    """Write `text` to stderr, if any, after closing progress bars, which would redraw themselves over it."""
    start = "\n" if world_size() > 1 else ""  # another rank's bar may have left the cursor in the middle of a line
    bounded(lambda: ([bar.close() for bar in open_bars()], sys.stdout.flush()), _WRITE_S)
    if text:
        bounded(lambda: (sys.stderr.write(f"{start}{text}\n"), sys.stderr.flush()), _WRITE_S)


def write_stacks() -> None:
    """Write the stack traces of all threads to a local file; move it to the output folder unless its disk hangs."""
    if (file := _local_file()) is not None:
        faulthandler.dump_traceback(file, all_threads=True)
        _move(file)


def _local_file() -> IO[str] | None:
    prefix = f"alignment-{STACKS}{rank()}-"
    return bounded(lambda: tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".txt", delete=False), _WRITE_S)


def _move(file: IO[str]) -> None:
    file.close()
    path = (ACTIVITY.folder or Path()) / f"{STACKS}{rank()}.txt"
    bounded(lambda: shutil.move(file.name, path) if os.path.getsize(file.name) else os.unlink(file.name), _WRITE_S)


class DeadManSwitch:
    """Writes stack traces to a local file and may end the process, unless a thread keeps it from it.

    It acts even if the interpreter lock is held. ``faulthandler`` has one timer per process: once someone else has set
    it, the switch leaves it alone; only a timer that was set before this module was imported goes unnoticed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a timer that is set after disarming would end the process
        self._file: IO[str] | None = None  # while it is armed
        self._exits, self._of_others = False, False
        self._set, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
        faulthandler.dump_traceback_later = self._set_by_others

    def _set_by_others(self, *arguments: Any, **options: Any) -> None:
        self._of_others = True
        self._set(*arguments, **options)

    @contextlib.contextmanager
    def armed(self, seconds: float, *, exits: bool) -> Iterator[None]:
        """Within the outermost such context, act after ``seconds`` unless kept from it."""
        if self._file is not None:
            yield
            return
        self._file, self._exits = _local_file(), exits
        self.keep(seconds)  # the interpreter lock may be held before the thread comes to it
        try:
            yield
        finally:
            with self.lock:
                file, self._file = self._file, None
                if not self._of_others:
                    self._cancel()
            if file is not None:
                _move(file)

    def keep(self, seconds: float) -> None:
        """If it is armed, keep it from acting for the next ``seconds``."""
        with self.lock, contextlib.suppress(RuntimeError):  # no thread can be started for it, which may pass
            if self._file is not None and not self._of_others:
                self._set(min(seconds, _MONTH_S), exit=self._exits, file=self._file)

    def pause(self) -> None:
        """Cancel the timer before a fork, and keep it from being set: a child would wait for its thread."""
        self.lock.acquire()
        if self._file is not None and not self._of_others:
            self._cancel()

    def forget(self) -> None:
        """Disarm it in a forked child, which has none of the threads that may hold its lock."""
        self.lock, self._file = threading.Lock(), None


SWITCH = DeadManSwitch()
os.register_at_fork(before=SWITCH.pause, after_in_parent=lambda: SWITCH.lock.release(), after_in_child=SWITCH.forget)
