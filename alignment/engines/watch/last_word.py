"""The last word of a job: one rank claims it and says why the job ends, the others fall silent and end as it does.

Nothing here waits for long: the store, the disk or the terminal may be what has failed. The line comes before anything
that may hang, and whatever goes wrong, the process ends.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from alignment.engines.deadlines import bounded
from alignment.engines.watch.ending import WRITE_S, end_process, end_within, mute, write, write_stacks
from alignment.reporting.activity import ACTIVITY

ASK_S = 3.0  # how long a last word waits for the store
_HUSH_S = 5.0  # how long the speaker waits for the others to fall silent
_SPEECH_S = 10.0  # how long a silent rank waits for the speaker
_LONGEST_S = 25.0  # how long all of it may take
_HEARD_S = 1.0  # how long a rank 0 that has spoken keeps the store for those that want to read it


@dataclass(frozen=True)
class Verdict:
    """Why the job ends, as the rank that claims the last word tells the others.

    Attributes:
        code: the exit status of every rank.
        state, signal: for ``status.json``.
        hung: every rank is to write its stacks.
        dead: ranks that cannot end by themselves, and do not answer.
    """

    code: int = 1
    state: str = "failed"
    signal: str | None = None
    hung: bool = False
    dead: tuple[int, ...] = ()

    @classmethod
    def parsed(cls, text: str | bytes) -> Verdict:
        """What a rank has put into the store."""
        found = json.loads(text)
        return cls(**{**found, "dead": tuple(found["dead"])})


class LastWord:
    """The right to say why the job ends, as one rank sees it.

    Args:
        store: over which ranks talk; None: there is nobody to talk to.
        rank: this one.
        bury: called before this process ends, with the verdict, the line, and whether this rank speaks: what is to be
            done about dead ranks.
    """

    def __init__(
        self, store: Any, rank: int, bury: Callable[[Verdict, str, bool], None] = lambda verdict, line, speaks: None
    ) -> None:
        self._store, self._rank, self._bury = store, rank, bury
        self._mouth = threading.Lock()  # never released: of several threads, one writes and ends the process

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
        """Say why the job ends, unless another rank does, and end this process.

        Args:
            line: for the user.
            verdict: for the other ranks.
            living: the other ranks that can still answer.
            trace: before the line.
            at_once: do not wait for the others to fall silent.
            speaks: whether this rank is the one to write the line, where there is no store to agree on it; None: ask.
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
                mute()  # torch may still have to say that the connections of other threads have broken
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
        """Close stdout and stderr, wait for the rank that speaks to have spoken, and end as it does.

        A second of grace lets that rank be the first to exit: a launcher that ends all at the first exit, or reports
        the first as the cause, then takes the right one.
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
            self._close(verdict, said or "another rank ended the job without saying why", speaks=False)
            time.sleep(1.0)
        raise AssertionError

    @contextlib.contextmanager
    def _ending(self, code: int) -> Iterator[list[int]]:
        """At the end of this context the process ends, whatever happens within it, and if it takes too long.

        Yields:
            The exit status, which may be changed.
        """
        self._mouth.acquire()
        final = [code]
        try:
            end_within(_LONGEST_S, code)
            yield final
        finally:
            end_process(final[0])

    def _close(self, verdict: Verdict, line: str, *, speaks: bool) -> None:
        """What is left to be done once the line is out: it may hang."""
        if speaks and verdict.hung:
            write_stacks(ACTIVITY.folder, self._rank)
        record(line, verdict)
        bounded(lambda: self._bury(verdict, line, speaks), WRITE_S)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not bounded(reached, ASK_S) and time.monotonic() < end:
            time.sleep(0.1)


def record(line: str, verdict: Verdict, seconds: float = WRITE_S) -> None:
    """Write how the run ended into ``status.json``, where this process keeps it and its disk answers.

    Args:
        line: for the user.
        verdict: how it ended.
        seconds: that the disk may take.
    """
    status = ACTIVITY.status
    if status is not None:
        said = line.strip().removeprefix("error: ") or f"exit status {verdict.code}"
        error = said if verdict.state == "failed" else None
        bounded(lambda: status.update(state=verdict.state, signal=verdict.signal, error=error), seconds)
