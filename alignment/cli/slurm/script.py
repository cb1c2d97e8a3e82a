"""The batch script of a job: ``launch/slurm/train.sbatch`` with all values filled in, as sbatch expands nothing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import alignment
from alignment.cli.slurm.request import Request, time_text
from alignment.config.errors import OptionError
from alignment.config.lookup import packaged

HEADER = "#SBATCH "


def render(request: Request, arguments: Sequence[str], *, log: Path, folder: Path) -> str:
    """Return the batch script of a job.

    Args:
        request: the job.
        arguments: arguments of the command, the recipe first.
        log: path of the job's output, with SLURM's filename patterns.
        folder: the working directory.
    """
    lines = packaged("slurm", "train").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(HEADER))
    code = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    comment = [line for line in lines[first:code] if not line.startswith(HEADER)]
    header = [HEADER + option for option in header_options(request, log, folder)]
    return "\n".join([lines[0], *header, *comment, *_settings(request, arguments), *lines[code:], ""])


def header_options(request: Request, log: Path, folder: Path) -> list[str]:
    """Return the sbatch options of the header, one per line."""
    given = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks,
        "gpus-per-node": request.gpus if request.gpus.number else "",
        "cpus-per-task": request.cpus,
        "mem": request.mem,
        "time": time_text(request.time),
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "array": request.seeds,
        "signal": f"USR1@{request.notice}" if request.command == "train" else "",
        "chdir": folder,
        "output": log,
    }
    options = [f"--{name}={_quoted(str(value))}" for name, value in given.items() if value != ""]
    return [*options, "--requeue", "--open-mode=append", *request.sbatch]


def log_pattern(request: Request, output_dir: Path) -> Path:
    """Return the path of the job's output: next to the output folder, not in it, which must be empty at first."""
    number = "%A_%a" if request.seeds else "%j"
    prepared = "-prepare" if request.command == "prepare" else ""
    return Path(f"{str(output_dir).replace('%', '%%')}{prepared}-{number}.out")


def _settings(request: Request, arguments: Sequence[str]) -> list[str]:
    given = {
        "ALIGNMENT_SETUP": request.setup,
        "ALIGNMENT_CONTAINER": request.container,
        "ALIGNMENT_MOUNTS": request.mounts,
        "ALIGNMENT_PYTHON": os.environ.get("ALIGNMENT_PYTHON") or ("" if request.container else sys.executable),
        "ALIGNMENT_COMMAND": request.command,
        "ALIGNMENT_STOP_NOTICE": str(request.notice) if request.command == "train" else "",
    }
    run = request.run or request
    if not run.gpus.number:
        given["DS_ACCELERATOR"] = "cpu"
    if request.run is not None:
        arguments = [*arguments, "--ranks", str(run.nodes * run.tasks)]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in given.items() if value]
    unused = [name for name, value in given.items() if not value]
    checkout = Path(alignment.__file__).resolve().parent.parent
    if not request.container and (checkout / "launch" / "train.py").is_file():
        lines.append(f"export PYTHONPATH={shlex.quote(str(checkout))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return ["", f"unset {' '.join(unused)}", *lines, f"set -- {shlex.join(arguments)}"]


def _quoted(value: str) -> str:
    if any(sign in value for sign in "\"'\\\n"):
        raise OptionError(
            f"{value!r}: sbatch does not support paths with quotes, backslashes or line breaks; rename it"
        )
    return f'"{value}"' if " " in value or "#" in value else value
