"""Start a launcher with its workers, send a signal, and wait until all of its processes have exited."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tools.ranks.client import ROOT, environment
from tools.ranks.process import free_port, wait_until
from tools.signals.worker import VARIABLE, Plan, Trail

BOUND_S = 45.0  # after this time, remaining processes are a failure
_POLL_S = 0.05
_TWICE_S = 2.5  # time between two SIGINT
# Background jobs of a shell ignore SIGINT, and so do their child processes.
_AS_FROM_A_TERMINAL = ["env", "--default-signal=INT,TERM,HUP,USR1"]
_ALL_SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def launch_command(script: str | Path, nproc: int, launcher: str) -> list[str]:
    """Return the command without the script's arguments."""
    if launcher == "deepspeed":
        options = ["--num_gpus", str(nproc), "--master_port", str(free_port())]
        return [sys.executable, "-m", "deepspeed.launcher.runner", *options, str(script)]
    if launcher.startswith("torchrun"):
        options = ["--nproc_per_node", str(nproc), "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        options += [_ALL_SIGNALS] if launcher == "torchrun+USR1" else []
        return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    return [sys.executable, str(script)]


@dataclass(frozen=True)
class End:
    """How the processes ended: exit statuses, None if one was killed, and seconds from the signal until then.

    ``left`` are the processes that had to be killed after the limit.
    """

    code: int | None
    ranks: tuple[int | None, ...]
    seconds: float
    left: tuple[str, ...]


class Launched:
    """A run started by a launcher in a separate session, with its output in the file ``log``."""

    def __init__(self, command: Sequence[str], plan: Plan, ranks: int, log: Path) -> None:
        self.plan, self.log = plan, log
        Path(plan.folder).mkdir(parents=True)
        self.trails = [Trail(Path(plan.folder), rank) for rank in range(ranks)]
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **plan.variable()}
        with log.open("w") as out:
            given: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            given |= {"env": environment(**variables), "start_new_session": True}
            self.process = subprocess.Popen([*_AS_FROM_A_TERMINAL, *command], **given)

    def text(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        """Wait until all ranks have started a step."""

        def started() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before step {step}:\n{self.text()[-4000:]}")
            return all((trail.get("step") or 0) >= step for trail in self.trails)

        wait_until(started, seconds, lambda: f"step {step}\n{self.text()[-4000:]}")

    def send(self, target: str, name: str) -> None:
        """Send a signal (``INT2``: SIGINT twice), or create the file ``STOP``."""
        if name == "STOP":
            (Path(self.plan.output_dir) / "STOP").touch()
            return
        for number in range(2 if name == "INT2" else 1):
            time.sleep(_TWICE_S * number)
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                self._send(target, signal.Signals[f"SIG{'INT' if name == 'INT2' else name}"])

    def _send(self, target: str, number: signal.Signals) -> None:
        if target == "group":
            os.killpg(self.process.pid, number)
        elif target == "launcher":
            self.process.send_signal(number)
        elif target == "launch.py":
            children = psutil.Process(self.process.pid).children()
            (launch_py,) = [child for child in children if "deepspeed.launcher.launch" in child.cmdline()]
            launch_py.send_signal(number)
        else:
            os.kill(self.trails[int(target.removeprefix("rank"))].pid, number)

    def wait(self, bound: float = BOUND_S) -> End:
        """Wait until all processes have exited; kill the remaining ones after ``bound`` seconds."""
        start = time.monotonic()
        while (left := list(self.processes())) and time.monotonic() < start + bound:
            time.sleep(_POLL_S)
        seconds = time.monotonic() - start
        code = None if self.process.pid in [process.pid for process in left] else self.process.wait()
        self.end()
        return End(code, tuple(trail.get("code") for trail in self.trails), seconds, tuple(map(str, left)))

    def processes(self) -> Iterator[psutil.Process]:
        """Return all running processes with the plan in their environment, regardless of their current parent."""
        self.process.poll()  # reap it if it is a zombie
        own = f"{VARIABLE}={self.plan.variable()[VARIABLE]}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if own in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    yield process

    def end(self) -> None:
        """Kill all remaining processes."""
        while left := list(self.processes()):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(_POLL_S)
        self.process.wait()
