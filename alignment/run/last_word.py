"""The last word of a job: one rank claims it and reports why the job ends; the others fall silent and exit with it.

Nothing here waits for long, because the store, the disk or the terminal may be what has failed. The message is written
before anything that may hang, and the process exits whatever goes wrong.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from alignment.run.activity import ACTIVITY
from alignment.run.deadlines import bounded
from alignment.run.ending import WRITE_S, end_process, end_within, mute, write, write_stacks

ASK_S = 3.0  # limit for a call to the store
_HUSH_S = 5.0  # how long the reporting rank waits for the others to fall silent
_SPEECH_S = 10.0  # how long a silent rank waits for the reporting rank
_LONGEST_S = 25.0  # limit for all of it
_REPORT_S = 10.0  # that the report of a failed run may take
_HEARD_S = 1.0  # how long a reporting rank 0 keeps the store for the other ranks


@dataclass(frozen=True)
class Verdict:
    """Why the job ends, as published by the rank that claims the last word.

    Attributes:
        code: exit status of every rank.
        state, signal: values for ``status.json``.
        hung: whether every rank writes its stack traces.
        dead: ranks that do not respond and cannot exit by themselves.
    """

    code: int = 1
    state: str = "failed"
    signal: str | None = None
    hung: bool = False
    dead: tuple[int, ...] = ()

    @classmethod
    def parsed(cls, text: str | bytes) -> Verdict:
        """Parse the text that a rank has put into the store."""
        found = json.loads(text)
        return cls(**{**found, "dead": tuple(found["dead"])})


class LastWord:
    """One rank's view of the right to report why the job ends.

    Args:
        store: the store that the ranks share; None if this process is on its own.
        rank: this rank.
        bury: called with the verdict, the line and whether this rank reports, before the process exits; takes care of
            dead ranks.
    """

    def __init__(
        self, store: Any, rank: int, bury: Callable[[Verdict, str, bool], None] = lambda verdict, line, speaks: None
    ) -> None:
        self._store, self._rank, self._bury = store, rank, bury
        self._mouth = threading.Lock()  # never released: only one thread writes and exits

    def speak(
        self,
        line: str,
        verdict: Verdict,
        living: Callable[[], Collection[int]] = tuple,
        *,
        trace: str = "",
        at_once: bool = False,
        speaks: bool | None = None,
    ) -> NoReturn:
        """Report why the job ends, unless another rank does, and exit.

        Args:
            line: message for the user.
            verdict: verdict for the other ranks.
            living: returns the other ranks that still respond.
            trace: traceback that precedes the line.
            at_once: do not wait for the others to fall silent.
            speaks: whether this rank writes the line, if there is no store to agree on it; None: ask the store.
        """
        claimed = bounded(lambda: self._claim(verdict), ASK_S) if self._store is not None and speaks is None else None
        if claimed is False:
            self.follow()
        with self._ending(verdict.code):
            if claimed and not at_once:
                self._wait(lambda: self._store.check([f"silent/{other}" for other in living()]), _HUSH_S)
            # Another rank's progress bar may have left the cursor in the middle of a line.
            before = "" if self._store is None else "\n"
            if speaks is not False:
                write(f"{before}{trace}{line}")
            with contextlib.suppress(OSError):
                mute()  # torch may still report broken connections of other threads
            self._close(verdict, line, speaks=speaks is not False)
            if claimed:
                bounded(lambda: self._store.set("said", line), ASK_S)
                if self._rank == 0:  # the store may end with this process
                    wanted = len(living())
                    self._wait(lambda: self._store.add("heard", 0) >= wanted, _HEARD_S)
        raise AssertionError

    def _claim(self, verdict: Verdict) -> bool:
        if self._store.add("claim", 1) > 1:
            return False
        self._store.set("why", json.dumps(asdict(verdict)))
        return True

    def follow(self) -> NoReturn:
        """Close stdout and stderr, wait until the reporting rank has written its line, and exit with its status.

        A one-second delay lets that rank exit first: a launcher that ends all ranks at the first exit, or reports the
        first exit as the cause, then picks the right one.
        """
        with self._ending(Verdict().code) as code:
            mute()
            bounded(lambda: self._store.set(f"silent/{self._rank}", "1"), ASK_S)
            self._wait(lambda: self._store.check(["why"]), ASK_S)
            verdict = bounded(lambda: Verdict.parsed(self._store.get("why")), ASK_S) or Verdict()
            code[0] = verdict.code
            if verdict.hung:
                write_stacks(ACTIVITY.folder, self._rank)
            self._wait(lambda: self._store.check(["said"]), _SPEECH_S)
            said = bounded(lambda: self._store.get("said").decode(), ASK_S)
            bounded(lambda: self._store.add("heard", 1), ASK_S)
            self._close(verdict, said or "another rank ended the job without reporting a reason", speaks=False)
            time.sleep(1.0)
        raise AssertionError

    @contextlib.contextmanager
    def _ending(self, code: int) -> Iterator[list[int]]:
        """Exit at the end of this context whatever happens within it, or earlier if it takes too long.

        Yields:
            The exit status, as a list of one element that may be changed.
        """
        self._mouth.acquire()
        final = [code]
        try:
            end_within(_LONGEST_S, code)
            yield final
        finally:
            end_process(final[0])

    def _close(self, verdict: Verdict, line: str, *, speaks: bool) -> None:
        """Do the rest once the line is written; this may hang."""
        if speaks and verdict.hung:
            write_stacks(ACTIVITY.folder, self._rank)
        record(line, verdict)
        bounded(lambda: self._bury(verdict, line, speaks), WRITE_S)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not bounded(reached, ASK_S) and time.monotonic() < end:
            time.sleep(0.1)


def record(line: str, verdict: Verdict, seconds: float = WRITE_S) -> None:
    """Record in ``status.json`` how the run ended, if this process writes that file and the disk responds.

    Args:
        line: message for the user.
        verdict: how the run ended.
        seconds: time limit for the write.
    """
    status = ACTIVITY.status
    if status is not None:
        said = line.strip().removeprefix("error: ") or f"exit status {verdict.code}"
        error = said if verdict.state == "failed" else None
        bounded(lambda: status.update(state=verdict.state, signal=verdict.signal, error=error), seconds)
        if error is not None and not verdict.hung and ACTIVITY.at_failure is not None:
            bounded(ACTIVITY.at_failure, _REPORT_S)
