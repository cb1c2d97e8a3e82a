"""A queue of uploads, processed one at a time in parallel with training."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from alignment.config.errors import HubError
from alignment.training.hub.process import Answer

_LEAST_S, _SLOWEST = 600.0, 1e6  # minimum timeout, and lowest expected bytes per second
_LONGEST_PAUSE = 300.0


class Call(Protocol):
    """Sends a request to the Hub, with a time limit in seconds."""

    def __call__(self, request: Mapping[str, Any], seconds: float) -> Answer: ...

    def cut_off(self) -> None:
        """Cancel the current call."""


@dataclass
class Push:
    """An upload.

    Attributes:
        label: what is uploaded, such as ``step 100``.
        step: step of the weights.
        request: sent to the Hub.
        folder: staged files; removed when the upload is over.
        size: in bytes.
        tries: number of attempts for transient failures.
        last: whether it is the final upload, or was requested by a caller.
        future: resolves to the answer.
    """

    label: str
    step: int
    request: dict[str, Any] = field(repr=False)  # contains the token
    folder: Path
    size: int
    tries: int = 1
    last: bool = False
    future: Future[Answer] = field(default_factory=Future)


@dataclass(frozen=True)
class Outcome:
    """A finished upload and its answer."""

    push: Push
    answer: Answer
    seconds: float


class Pushes:
    """Processes uploads in a daemon thread.

    Args:
        call: sends requests to the Hub.
        pause: seconds before the first retry; doubles with each further one.
    """

    def __init__(self, call: Call, pause: float) -> None:
        self._call, self._pause = call, pause
        self._waiting: deque[Push] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._outcomes: deque[Outcome] = deque()
        self._over = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether an upload is in progress or queued."""
        with self._changed:
            return self._thread is not None

    def add(self, push: Push) -> None:
        """Queue an upload."""
        with self._changed:
            self._waiting.append(push)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hub uploads", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for all uploads, up to a time limit; return whether all are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def outcomes(self) -> list[Outcome]:
        """Return the uploads that are over since the last call, oldest first."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def cut_off(self) -> None:
        """Cancel all uploads, queued ones included; each one ends with an error."""
        self._over.set()
        self._call.cut_off()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                push = self._waiting.popleft()
            began = time.monotonic()
            answer = self._tried(push)
            if answer.error is None or not push.last:
                shutil.rmtree(push.folder, ignore_errors=True)
            self._outcomes.append(Outcome(push, answer, time.monotonic() - began))
            if answer.error is None:
                push.future.set_result(answer)
            else:
                push.future.set_exception(HubError(answer.error))

    def _tried(self, push: Push) -> Answer:
        pause = self._pause
        seconds = _LEAST_S + push.size / _SLOWEST
        for number in range(push.tries, 0, -1):
            answer = self._call(push.request, seconds)
            if answer.error is None or not answer.transient or number == 1 or self._over.wait(pause):
                return answer
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError
