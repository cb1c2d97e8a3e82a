"""One call of the hub in a process of its own, bounded in time, that can be cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("worker.py")
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
CUT_OFF = "cut off, for the run ends"
_LONGEST = 300  # characters of what a process said that failed


@dataclass(frozen=True)
class Answer:
    """What became of a call.

    Attributes:
        repo: the repository with its owner.
        commits: ``url``, ``oid`` and ``message`` of each.
        error: why it failed, in one line without the token; None where it did not.
        transient: whether a later attempt may not fail.
    """

    repo: str = ""
    commits: tuple[Mapping[str, str], ...] = ()
    error: str | None = None
    transient: bool = False


class HubCall:
    """Runs :mod:`worker` for one request after another.

    The token goes through a pipe: other users see the arguments of a process, and its children its environment.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ended = False

    def __call__(self, request: Mapping[str, Any], seconds: float) -> Answer:
        """Wait for the answer.

        Args:
            request: as :func:`alignment.training.hub.worker.answer` takes it.
            seconds: after so many the process is killed.
        """
        with self._lock:
            if self._ended:
                return Answer(error=CUT_OFF)
            process = self._process = self._started()
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            try:
                process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended already, and its output says why
            said = process.stdout.read().decode(errors="replace")
            status = process.wait()
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            process.stdin.close()
            process.stdout.close()
        if self._ended:
            return Answer(error=CUT_OFF)
        if not in_time:
            return Answer(error=f"it was given up after {seconds:.0f} s", transient=True)
        return _answer(said, status, request.get("token"))

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_QUIET},
            start_new_session=True,  # Ctrl-C is the run's, which ends this process itself
        )

    def cut_off(self) -> None:
        """End a call that is under way, and let none begin any more."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.poll() is None:
                self._process.kill()


def _answer(said: str, status: int, token: str | None) -> Answer:
    lines = [line for line in said.splitlines() if line.strip()] or [""]
    try:
        found = json.loads(lines[-1])
        if "error" in found:
            return Answer(error=str(found["error"]), transient=bool(found["transient"]))
        return Answer(str(found["repo"]), tuple(found["commits"]))
    except (ValueError, TypeError, KeyError):
        told = lines[-1] if token is None else lines[-1].replace(token, "<hidden>")
        return Answer(error=f"the upload's process ended with status {status}: {told[:_LONGEST]}", transient=True)
