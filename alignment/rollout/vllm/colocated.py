"""A vLLM server on the device of this rank, which lives as long as the run."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from alignment.config.dtypes import uses_cuda
from alignment.config.errors import OptionError, TrainingError, setting
from alignment.config.options_online import OnlineOptions
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.rollout.vllm.command import LOCAL, colocated_environment, serve_command
from alignment.run import supervise
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import local_rank, rank

GRACE_S = 10.0  # that the server has to end by itself
_POLL_S = 0.5
_READ_BYTES = 20_000  # of the end of the log, for a message
_CAUSE = re.compile(r"\b\w+(Error|Exception): .+|\berror: .+")


class Colocated:
    """Starts a server on 127.0.0.1, with a random API key, and stops it.

    A supervisor (:mod:`.supervise`) is the leader of the server's session and process group, so that Ctrl-C in a
    terminal reaches the run only, and ends the server if this process is gone.

    Args:
        options: the run's options.
        source: the policy's model.
        adapters: its adapters, if they are trained instead of the model.
        compute: the dtype in which the policy computes.
        folder: folder for the log of the server; if it does not exist, a temporary one is used.

    Attributes:
        key: the API key, which is neither logged nor saved.
        log: the log of the server.

    Raises:
        ModelError: the server cannot load the model by a path.
        OptionError: there is no program ``vllm_executable``.
    """

    def __init__(
        self, options: OnlineOptions, source: ModelSource, adapters: Adapters | None, compute: str, folder: Path
    ) -> None:
        self.options = options
        found = shutil.which(os.path.expanduser(options.vllm_executable))
        if found is None:
            name = setting("vllm_executable", options.vllm_executable)
            raise OptionError(f"{name}: no such program; install vLLM in its own environment and set its bin/vllm")
        with socket.socket() as free:
            free.bind((LOCAL, 0))
            port = free.getsockname()[1]
        self._url = f"http://{LOCAL}:{port}"
        self._command = serve_command(options, source, adapters, compute, host=LOCAL, port=port)
        self._command[0] = found
        if not folder.is_dir():  # of a command that writes elsewhere, such as `sample`
            folder = Path(tempfile.mkdtemp(prefix="vllm-"))
        self.key, self.log = secrets.token_urlsafe(32), folder / f"vllm-{rank()}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = 0  # size of the log when the server was started, or was ready

    def start(self) -> str:
        """Start the server and return its address, once it is ready.

        Raises:
            TrainingError: the server has exited, or is not ready within ``vllm_server_timeout``.
        """
        device = local_rank() if uses_cuda(self.options) else None
        environment = colocated_environment(self.options, self.key, device)
        with self.log.open("ab") as log:
            self._begun = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervise.__file__, str(os.getpid()), str(GRACE_S), *self._command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self._url

    def _wait(self) -> None:
        """Wait until the server is ready."""
        deadline = time.monotonic() + (limit := self.options.vllm_server_timeout)
        while not self._healthy():
            self.check()
            if time.monotonic() > deadline:
                why = f"not ready after {limit:.0f} s ({setting('vllm_server_timeout', limit)})"
                raise TrainingError(f"the vLLM server of rank {rank()} is {why}: {self._last_lines()}")
            ACTIVITY.progress()
            time.sleep(_POLL_S)
        self.check()  # otherwise another server has the port
        self._begun = self.log.stat().st_size  # earlier errors did not keep it from starting

    def check(self) -> None:
        """Raise TrainingError if the server has exited."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise TrainingError(
                f"the vLLM server of rank {rank()} has exited with status {status}: {self._last_lines()}"
            )

    def stop(self) -> None:
        """Stop the server and all of its processes. Has no effect if it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S + 5.0)
        if process.poll() is None or process.returncode < 0:  # the supervisor hangs, or was killed itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self._url}/health", timeout=5.0, trust_env=False).status_code == 200
        return False

    def _last_lines(self) -> str:
        """Return the first error in what the server has written, or its last line, and where the log is."""
        with self.log.open("rb") as log:
            log.seek(max(self._begun, self.log.stat().st_size - _READ_BYTES))
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        causes = [found.group() for line in lines if (found := _CAUSE.search(line)) is not None]
        said = causes[0] if causes else lines[-1] if lines else "it has written nothing"
        return f"{said.replace(self.key, '<KEY>')[:400]} (log: {self.log})"
