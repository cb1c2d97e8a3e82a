"""Start the server on first use, and request it to run scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client
from pathlib import Path

from tools.ranks.job import Job, Outcome
from tools.ranks.process import COVERAGE

ROOT = Path(__file__).resolve().parent.parent.parent
ADDRESS = "ALIGNMENT_RANK_SERVER"  # the socket of a running server
_MEASURED_TIMES = 4  # longer timeouts if coverage is measured
# Variables set by a launcher, or by an earlier run in this process, which a rank must not inherit.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


class RanksFailed(Exception):
    """Raised if a rank failed or hung. The message names it and ends with the logs of all ranks."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.report())
        self.outcome = outcome


class RankServer:
    """A handle for the server, which is started by the first job unless ``ALIGNMENT_RANK_SERVER`` names its socket.

    The ranks import the packages of the checkout ``root`` and the libraries of the interpreter ``python``.
    """

    def __init__(self, root: Path = ROOT, address: str | None = None, python: str = sys.executable) -> None:
        self.root, self._python = root, python
        self._process: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._address = address or (os.environ.get(ADDRESS) if python == sys.executable else None)

    @property
    def address(self) -> str:
        """The socket of the server, which is started if necessary, by one thread."""
        with self._starting:
            if self._address is None:
                self._address = self._start()
            return self._address

    def _start(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="rank-server-")
        address = os.path.join(self._folder.name, "socket")
        self._process = subprocess.Popen(
            [self._python, "-m", "tools.ranks.server", address],
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1", COVERAGE_PROCESS_START=""),  # measure the ranks, not the server
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the rank server exited with status {self._process.wait()} before it was ready")
        return address

    def run(
        self,
        script: str | Path,
        *arguments: object,
        nproc: int = 2,
        timeout: float = 120,
        grace: float = 15,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
    ) -> Outcome:
        """Run ``script`` on ``nproc`` ranks, each in a separate process, and wait for all of them.

        The script is run as ``__main__``, with its own folder, the checkout and its ``tests`` first on the path, and
        with additional environment variables. Ranks that run after ``timeout`` seconds, or ``grace`` seconds after
        another one has failed, are killed. RanksFailed is raised if a rank hung or, with ``check``, failed.
        """
        paths = [str(self.root), str(self.root / "tests"), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **(env or {})}
        if COVERAGE in os.environ:
            timeout *= _MEASURED_TIMES
        folder = str(cwd or os.getcwd())
        job = Job(str(script), tuple(map(str, arguments)), nproc, environment(**variables), folder, timeout, grace)
        with Client(self.address, family="AF_UNIX") as connection:
            connection.send(job)
            outcome: Outcome = connection.recv()
        if outcome.hung or (check and outcome.returncode):
            raise RanksFailed(outcome)
        return outcome

    def close(self) -> None:
        """Stop the server if this handle started it."""
        if self._process is not None:
            self._process.communicate()  # closes its standard input
            self._folder.cleanup()
            self._process = None


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, updated with ``more``."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES} | more
