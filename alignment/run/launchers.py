"""The launchers above this process, and the time they leave between a request to stop and the kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil

from alignment.run.ranks import NOTICE

# Programs and modules that start ranks and monitor them. Shells do not count: a `nohup … &` run outlives its shell.
_PROGRAMS = {"torchrun", "deepspeed", "deepspeed.pt", "ds", "accelerate", "accelerate-launch", "slurmstepd"}
_MODULES = {
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "accelerate.commands.launch",
}
_SCRIPTS = ("torch/distributed/run.py", "torch/distributed/launch.py", "deepspeed/launcher/launch.py")
_LAUNCHER_NOTICE_S = 30.0  # of torchrun (--shutdown-timeout) and DeepSpeed's launch.py
_TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "run.py"}
_SHUTDOWN = ("--shutdown-timeout", "--shutdown_timeout")
_SHUTDOWN_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # also read by torchrun
_KILL_WAIT_S = 30.0  # SLURM's default


class Launcher(NamedTuple):
    """An ancestor process that started this one as a rank."""

    pid: int
    name: str
    command: tuple[str, ...] = ()


def launchers() -> list[Launcher]:
    """The launchers among the ancestors of this process, nearest first."""
    found = []
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                command = ancestor.cmdline()
                name = launcher_name(command)
                if name:
                    found.append(Launcher(ancestor.pid, name, tuple(command)))
    return found


def launcher_name(command: list[str]) -> str:
    """The name of a launcher, from its command line; empty for any other process.

    Only the program counts and, for an interpreter, its script or module. An argument that happens to be ``deepspeed``
    does not make a process a launcher.
    """
    if not command:
        return ""
    program = Path(command[0]).name.partition(":")[0]  # SLURM appends the step ID
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
    """Whether a launcher started this process and exited before it could be found.

    Launchers leave environment variables and are the parents of their workers. An unknown launcher is still a Python
    program; the process that adopts orphans is not.
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
        seconds: its length.
        source: where the value comes from.
    """

    seconds: float
    source: str


def stop_notice() -> Notice | None:
    """The notice that this run gets: the shortest that applies, or None if nothing kills it.

    ``ALIGNMENT_STOP_NOTICE``, if set, overrides all others.
    """
    given = os.environ.get(NOTICE, "")
    with contextlib.suppress(ValueError):
        return Notice(float(given), NOTICE)
    found = [_of_launcher(launcher) for launcher in launchers() if launcher.name != "slurmstepd"]
    if os.environ.get("SLURM_JOB_ID"):
        found.append(Notice(*_kill_wait()))
    return min(found, default=None)


def _of_launcher(launcher: Launcher) -> Notice:
    if launcher.name not in _TORCHRUN and not launcher.name.startswith("accelerate"):
        return Notice(_LAUNCHER_NOTICE_S, f"fixed in {launcher.name}")
    asked = [os.environ.get(name, "") for name in _SHUTDOWN_VARIABLES]
    for option, value in zip(launcher.command, (*launcher.command[1:], "")):
        name, equals, own = option.partition("=")
        if name in _SHUTDOWN:
            asked.insert(0, own if equals else value)
    seconds = next((float(text) for text in asked if text.isascii() and text.isdecimal()), _LAUNCHER_NOTICE_S)
    return Notice(seconds, "torchrun --shutdown-timeout")


def _kill_wait() -> tuple[float, str]:
    """SLURM's ``KillWait``, from ``scontrol`` if it responds."""
    if shutil.which("scontrol"):
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError, StopIteration):
            shown = subprocess.run(
                ["scontrol", "show", "config"], capture_output=True, text=True, timeout=5, check=True
            ).stdout
            line = next(line for line in shown.splitlines() if line.split()[:1] == ["KillWait"])
            return float(line.split("=")[1].split()[0]), "SLURM's KillWait"
    return _KILL_WAIT_S, "SLURM's default KillWait"
