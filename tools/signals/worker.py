"""A worker of the run under test: ``launch/train.py`` with slow steps, a trail, and a fault at a chosen event.

Usage: ``worker.py arguments of launch/train.py…``, with a :class:`Plan` in the environment. No code of the package is
replaced; steps only take longer, and the actions of this process are recorded. ``make chaos`` runs it as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "ALIGNMENT_SIGNALS"
WORKER = Path(__file__)
SLOW_EVENT_S = 0.2
_BEATS_S = 1.2  # the time in which a rank has reported its activity to the others


@dataclass(frozen=True)
class Plan:
    """The plan for the workers of one attempt.

    Each worker writes its process ID, its steps and its exit status to ``folder``. Steps from ``slow_from`` on take
    ``slow`` additional seconds, which differ by rank. On ``rank``, the ``fault`` happens at the given occurrence of an
    event of :mod:`tools.chaos.events`, or of any event if it is ``""``: ``stop`` (SIGSTOP), ``kill`` (SIGKILL),
    ``sleep`` (the main thread hangs), ``slow`` (all further events take longer), or immediately ``crash`` (SIGKILL) or
    ``crash all`` (of all ranks). Each worker counts its events.
    """

    folder: str
    output_dir: str
    slow_from: int = 0
    slow: tuple[float, ...] = ()
    rank: int = 0
    event: str | None = None
    occurrence: int = 1
    fault: str = "stop"

    def variable(self) -> dict[str, str]:
        """Return the environment variable for a launcher."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


class Trail:
    """The files that a worker writes for the tool: ``WHAT-RANK`` for pid, step, fault, events (their number), code."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.events = folder, rank, 0

    def put(self, what: str, value: int) -> None:
        """Replace the file ``WHAT-RANK``."""
        hidden = self.folder / f".{what}-{self.rank}"
        hidden.write_text(str(value))
        hidden.rename(self.folder / f"{what}-{self.rank}")

    def get(self, what: str) -> int | None:
        """Read the file; None if it does not exist."""
        path = self.folder / f"{what}-{self.rank}"
        return int(path.read_text()) if path.exists() else None

    @property
    def pid(self) -> int:
        """The process ID of the rank, which has started."""
        return int((self.folder / f"pid-{self.rank}").read_text())


def main(plan: Plan) -> None:
    """Prepare this process, and run ``launch/train.py`` of the checkout that is first on the path."""
    trail = Trail(Path(plan.folder), int(os.environ.get("RANK", "0")))
    trail.put("pid", os.getpid())
    leave = os._exit

    def noted(status: int) -> NoReturn:
        """Record the exit status when the process sets it, because launchers do not report it."""
        trail.put("code", status)
        leave(status)

    os._exit = noted
    if plan.slow:
        _slow_steps(plan, trail)
    if plan.event is not None:
        _follow(plan, trail)
    spec = importlib.util.find_spec("alignment")
    assert spec is not None and spec.origin is not None
    sys.argv[0] = str(Path(spec.origin).parents[1] / "launch" / "train.py")
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        trail.put("events", trail.events)
        trail.put("code", code)


def _slow_steps(plan: Plan, trail: Trail) -> None:
    """Slow down the engine's steps, starting with a given one, and record each step before it starts."""
    import deepspeed

    done, step = 0, deepspeed.DeepSpeedEngine.step

    def slow(engine: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        trail.put("step", done)
        if done >= plan.slow_from:
            time.sleep(plan.slow[trail.rank])
        return step(engine, *args, **kwargs)

    deepspeed.DeepSpeedEngine.step = slow


def _follow(plan: Plan, trail: Trail) -> None:
    """Trigger the fault at its event."""
    from tools.chaos.events import Events

    left = plan.occurrence

    def hear(event: str, half: Callable[[], Any] | None) -> None:
        nonlocal left
        trail.events += 1
        if trail.rank != plan.rank or plan.event not in ("", event):
            return
        left -= 1
        if left == 0:
            if half is not None:
                half()
            if not plan.fault.startswith("crash"):
                time.sleep(_BEATS_S)
                trail.put("fault", os.getpid())
            _fail(plan)
        if left < 0 and plan.fault == "slow":
            time.sleep(SLOW_EVENT_S)

    events = Events(Path(plan.output_dir), hear)
    events.follow_run()
    events.follow_files()


def _fail(plan: Plan) -> None:
    if plan.fault == "sleep":
        time.sleep(600)
    others = Path(plan.folder).glob("pid-*") if plan.fault == "crash all" else ()
    for pid in (*(int(path.read_text()) for path in others), os.getpid()):
        if plan.fault != "slow":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if plan.fault == "stop" else signal.SIGKILL)


if __name__ == "__main__":
    main(Plan(**json.loads(os.environ[VARIABLE])))
