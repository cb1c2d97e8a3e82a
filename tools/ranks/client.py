"""Starts the server when it is first needed, and asks it to run scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Client
from pathlib import Path

from tools.ranks.job import Job, Outcome
from tools.ranks.process import COVERAGE

ROOT = Path(__file__).resolve().parent.parent.parent
ADDRESS = "ALIGNMENT_RANK_SERVER"  # the socket of a server that is running already
_MEASURED_TIMES = 4  # longer timeouts where coverage is measured
# What a launcher, or an earlier run in this process, leaves in the environment; a rank must not inherit it.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ALIGNMENT_SINGLE_PROCESS"),
)


class RanksFailed(Exception):
    """A rank failed or hung. The message names it and ends with the logs of all ranks."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.report())
        self.outcome = outcome


class RankServer:
    """A handle on the server, which is started by the first job unless ``ALIGNMENT_RANK_SERVER`` names one.

    Args:
        root: the checkout whose packages the ranks import.
        address: of a server that is running already; None: what the environment says.
        python: the interpreter whose libraries the ranks import.
    """

    def __init__(self, root: Path = ROOT, address: str | None = None, python: str = sys.executable) -> None:
        self.root, self._python = root, python
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._address = address or (os.environ.get(ADDRESS) if python == sys.executable else None)

    @property
    def address(self) -> str:
        """The server's socket; the server is running."""
        if self._address is None:
            self._address = self._start()
        return self._address

    def _start(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="rank-server-")
        address = os.path.join(self._folder.name, "socket")
        self._process = subprocess.Popen(
            [self._python, "-m", "tools.ranks.server", address],
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1", COVERAGE_PROCESS_START=""),  # ranks are measured, not what forks them
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the rank server ended with status {self._process.wait()} before it was ready")
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
        """Run ``script`` on ``nproc`` ranks, each in a process of its own, and wait for all of them.

        Args:
            script: run as ``__main__``, with its own folder, the checkout and its ``tests`` first on the path.
            arguments: of the script.
            nproc: number of ranks.
            timeout: seconds until they must have ended.
            grace: seconds that the others have to end by themselves after one has failed.
            env: variables beside those of this process.
            cwd: working directory; the present one if None.
            check: raise if a rank fails.

        Raises:
            RanksFailed: a rank hung, or, with ``check``, failed.
        """
        paths = [str(self.root), str(self.root / "tests"), os.environ.get("PYTHONPATH", "")]
        job = Job(
            script=str(script),
            arguments=tuple(map(str, arguments)),
            ranks=nproc,
            environment=environment(
                PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1", **(env or {})
            ),
            folder=str(cwd or os.getcwd()),
            timeout=timeout * (_MEASURED_TIMES if COVERAGE in os.environ else 1),
            grace=grace,
        )
        with Client(self.address, family="AF_UNIX") as connection:
            connection.send(job)
            try:
                outcome: Outcome = connection.recv()
            except EOFError as error:
                raise RuntimeError("the rank server has ended") from error
        if outcome.hung or (check and outcome.returncode):
            raise RanksFailed(outcome)
        return outcome

    def close(self) -> None:
        """End the server, if this handle started it."""
        if self._process is not None:
            self._process.communicate()  # closes its standard input
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, and ``more``."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES} | more
