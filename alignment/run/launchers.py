"""The launchers above this process."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import NamedTuple

import psutil

# Programs and modules that start ranks and monitor them. Shells do not count: a `nohup … &` run outlives its shell.
_LAUNCHERS = {
    *("torchrun", "deepspeed", "deepspeed.pt", "ds", "accelerate", "accelerate-launch", "slurmstepd"),
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
    *("deepspeed.launcher.launch", "deepspeed.launcher.runner"),
}


class Launcher(NamedTuple):
    """An ancestor process that started this one as a rank."""

    pid: int
    name: str


def launchers() -> list[Launcher]:
    """The launchers among the ancestors of this process, nearest first."""
    found = []
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                found.append(Launcher(ancestor.pid, launcher_name(ancestor.cmdline())))
    return [launcher for launcher in found if launcher.name]


def launcher_name(command: list[str]) -> str:
    """The name of a launcher, from its command line; empty for any other process.

    Only the program counts and, for an interpreter, its script or module. An argument that happens to be ``deepspeed``
    does not make a process a launcher.
    """
    program = Path(command[0]).name.partition(":")[0] if command else ""  # SLURM appends the step ID
    if program.startswith("python"):
        options = list(itertools.takewhile(lambda word: word.startswith("-"), command[1:]))
        script = command[len(options) + 1 :]
        program = Path(script[0]).name if script and "-c" not in options else ""
    return program if program in _LAUNCHERS else ""
