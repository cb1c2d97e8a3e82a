"""The launchers that this process runs under: which they are, and how much notice they give before they kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil

# Programs and modules that start ranks and watch them. No shell is one: a run started with `nohup … &` outlives it.
_PROGRAMS = {"torchrun", "deepspeed", "deepspeed.pt", "ds", "accelerate", "accelerate-launch", "slurmstepd"}
_MODULES = {
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "accelerate.commands.launch",
}
_SCRIPTS = ("torch/distributed/run.py", "torch/distributed/launch.py", "deepspeed/launcher/launch.py")
NOTICE = "ALIGNMENT_STOP_NOTICE"
_LAUNCHER_NOTICE_S = 30.0  # of torchrun (--shutdown-timeout) and of DeepSpeed's launch.py
_KILL_WAIT_S = 30.0  # SLURM's default


class Launcher(NamedTuple):
    """A process above this one that started it as a rank."""

    pid: int
    name: str


def launchers() -> list[Launcher]:
    """The launchers among the ancestors of this process, the nearest first."""
    found = []
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                name = launcher_name(ancestor.cmdline())
                if name:
                    found.append(Launcher(ancestor.pid, name))
    return found


def launcher_name(command: list[str]) -> str:
    """What a launcher is called, by its command line; empty for any other process.

    Only the program, and for an interpreter its script or module, count: an argument that happens to be called
    ``deepspeed`` makes no launcher.
    """
    if not command:
        return ""
    program = Path(command[0]).name.partition(":")[0]  # SLURM adds the number of the step
    if program in _PROGRAMS:
        return program
    if not program.startswith("python"):
        return ""
    rest = command[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
    if not rest or rest[0] == "-c":
        return ""
    if rest[0] == "-m":
        return rest[1] if len(rest) > 1 and rest[1] in _MODULES else ""
    script = Path(rest[0])
    return script.name if script.name in _PROGRAMS or rest[0].endswith(_SCRIPTS) else ""


def orphaned() -> bool:
    """Whether a launcher has started this process and was gone before it could be looked for.

    Launchers leave variables behind, and are the parents of what they start. One that is none of those known here is
    a Python program all the same; what takes over orphans is none.
    """
    if not any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK")) or launchers():
        return False
    with contextlib.suppress(psutil.Error, IndexError):
        parent = psutil.Process().parent()
        return parent is None or not Path(parent.cmdline()[0]).name.startswith("python")
    return True


class Notice(NamedTuple):
    """Time between a request to stop and the kill that follows it.

    Attributes:
        seconds: of it.
        source: where the figure comes from.
    """

    seconds: float
    source: str


def stop_notice() -> Notice | None:
    """The notice that this run gets; None where nothing kills it, as without a launcher."""
    given = os.environ.get(NOTICE, "")
    with contextlib.suppress(ValueError):
        return Notice(float(given), NOTICE)
    if os.environ.get("SLURM_JOB_ID"):
        return Notice(*_kill_wait())
    names = [launcher.name for launcher in launchers()]
    if not names:
        return None
    return Notice(_LAUNCHER_NOTICE_S, "torchrun --shutdown-timeout" if "torchrun" in names else f"fixed in {names[0]}")


def _kill_wait() -> tuple[float, str]:
    """SLURM's ``KillWait``, by ``scontrol`` where it answers."""
    if shutil.which("scontrol"):
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError, StopIteration):
            shown = subprocess.run(
                ["scontrol", "show", "config"], capture_output=True, text=True, timeout=5, check=True
            ).stdout
            line = next(line for line in shown.splitlines() if line.split()[:1] == ["KillWait"])
            return float(line.split("=")[1].split()[0]), "KillWait of SLURM"
    return _KILL_WAIT_S, "KillWait of SLURM, by default"
