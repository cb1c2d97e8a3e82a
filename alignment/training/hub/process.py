"""A call to the Hub in a separate process, with a time limit, that can be cancelled."""

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
CUT_OFF = "cancelled, because the run is ending"
_LONGEST = 300  # characters shown of a failed process's output


@dataclass(frozen=True)
class Answer:
    """The result of a call.

    Attributes:
        repo: the repository with its owner.
        commits: ``url``, ``oid`` and ``message`` of each commit.
        error: why it failed, on one line and without the token; None on success.
        transient: whether a retry may succeed.
    """

    repo: str = ""
    commits: tuple[Mapping[str, str], ...] = ()
    error: str | None = None
    transient: bool = False


class HubCall:
    """Runs :mod:`worker`, one request at a time.

    The token is sent through a pipe: other users can see a process's arguments, and its children its environment.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ended = False

    def __call__(self, request: Mapping[str, Any], seconds: float) -> Answer:
        """Send a request and return the answer.

        Args:
            request: see :func:`alignment.training.hub.worker.answer`.
            seconds: time limit, after which the process is killed.
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
                pass  # the process has already exited; its output has the reason
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
            return Answer(error=f"timed out after {seconds:.0f} s", transient=True)
        return _answer(said, status, request.get("token"))

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_QUIET},
            start_new_session=True,  # Ctrl-C goes to the run, which ends this process itself
        )

    def cut_off(self) -> None:
        """Cancel the current call and refuse new ones."""
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
        return Answer(error=f"the upload process exited with status {status}: {told[:_LONGEST]}", transient=True)
