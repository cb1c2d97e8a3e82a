"""One attempt of the run under test: ranks on the rank server that are killed from outside or kill themselves."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.chaos.events import Trail
from tools.chaos.plan import POINTS, Kill
from tools.chaos.rank import VARIABLE
from tools.ranks import Outcome, RankServer, RanksFailed

RANKS = 2
_POLL_S = 0.005
_NODE_LOST_S = 0.05  # maximum time between the ends of the two ranks
_TIMEOUT_S, _GRACE_S = 90.0, 25.0


@dataclass(frozen=True)
class End:
    """How an attempt ended.

    Attributes:
        killed: whether the kill happened.
        place: phase of the killed rank.
        code: 0 if all ranks succeeded.
        hung: ranks that did not exit by themselves.
        seconds: duration.
        trained_from: seconds until the first step; 0 if there was none.
        report: logs of all ranks.
    """

    killed: bool
    place: str
    code: int
    hung: tuple[int, ...]
    seconds: float
    trained_from: float
    report: str


class Attempt:
    """One attempt.

    Args:
        server: the server that forks the ranks.
        folder: folder for the files of the ranks; must not exist.
    """

    def __init__(self, server: RankServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self._outcome: Outcome | None = None
        self._failed: BaseException | None = None

    def run(self, arguments: list[str], output_dir: Path, kill: Kill | None, expected: float) -> End:
        """Start the ranks, kill them as planned, and wait for their ends.

        Args:
            arguments: command-line arguments.
            output_dir: output folder of the run.
            kill: the planned kill; None for none.
            expected: expected duration in seconds, of which a random moment is a fraction.
        """
        self.folder.mkdir(parents=True)
        start = time.monotonic()
        thread = threading.Thread(target=self._job, args=(arguments, output_dir, kill), daemon=True)
        thread.start()
        while thread.is_alive() and kill is not None:
            self._kill(kill, time.monotonic() - start, expected)
            time.sleep(_POLL_S)
        thread.join()
        if self._outcome is None:
            raise RuntimeError(f"{output_dir}: the attempt was not run") from self._failed
        return self._end(self._outcome, start, kill)

    def _job(self, arguments: list[str], output_dir: Path, kill: Kill | None) -> None:
        own = kill if kill is not None and kill.point is not None else None
        plan = {
            "folder": str(self.folder),
            "output_dir": str(output_dir),
            "ranks": () if own is None else own.ranks,
            "event": None if own is None else POINTS[own.point or ""].event,
            "occurrence": 1 if own is None else own.occurrence,
        }
        try:
            self._outcome = self.server.run(
                Path(__file__).with_name("rank.py"),
                *arguments,
                nproc=RANKS,
                timeout=_TIMEOUT_S,
                grace=_GRACE_S,
                env={VARIABLE: json.dumps(plan)},
                check=False,
            )
        except RanksFailed as error:
            self._outcome = error.outcome
        except BaseException as error:
            self._failed = error

    def _kill(self, kill: Kill, seconds: float, expected: float) -> None:
        """Kill ranks if the time has come."""
        if kill.point is None and seconds >= kill.moment * expected:
            for rank in kill.ranks:
                self._end_rank(rank)
        gone = [rank for rank in kill.ranks if self._is_gone(rank)]
        # Before rendezvous, ranks wait for each other until torch's timeout: only a launcher would notice.
        if gone and (kill.node_lost or self._place(gone[0]) == "start"):
            time.sleep(_NODE_LOST_S)
            for rank in range(RANKS):
                self._end_rank(rank)

    def _place(self, rank: int) -> str:
        """Return the last phase of a rank."""
        trail = Trail.read(self.folder / f"trail-{rank}")
        return trail[-1][1] if trail else "start"

    def _process(self, rank: int) -> psutil.Process | None:
        try:
            return psutil.Process(int((self.folder / f"pid-{rank}").read_text()))
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None

    def _is_gone(self, rank: int) -> bool:
        if not (self.folder / f"pid-{rank}").exists():
            return False
        process = self._process(rank)
        try:
            return process is None or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _end_rank(self, rank: int) -> None:
        process = self._process(rank)
        try:
            if process is not None:
                process.kill()
        except psutil.NoSuchProcess:
            return

    def _end(self, outcome: Outcome, start: float, kill: Kill | None) -> End:
        killed = any(rank.code == -9 and not rank.ended for rank in outcome.ranks)
        place = self._place(kill.ranks[0] if kill is not None else 0)
        phases = Trail.read(self.folder / "trail-0")
        trained = next((at - start for at, phase in phases if phase == "train"), 0.0)
        shutil.rmtree(self.folder)
        return End(
            killed=killed,
            place=place,
            code=outcome.returncode,
            hung=outcome.hung,
            seconds=time.monotonic() - start,
            trained_from=trained,
            report=outcome.report(),
        )
