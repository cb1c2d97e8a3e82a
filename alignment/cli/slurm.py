"""SLURM jobs: the batch script with all values filled in, as sbatch expands nothing, and its submission."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import alignment
from alignment.config.errors import AlignmentError, OptionError
from alignment.config.lookup import packaged

_HEADER = "#SBATCH "
_TIMEOUT_S = 60.0  # of a SLURM command


class SlurmError(AlignmentError):
    """SLURM is not available, does not respond, or rejects a job."""


@dataclass(frozen=True)
class Job:
    """A job that runs ``launch/slurm/train.sbatch``.

    Attributes:
        options: options of sbatch, such as ``--nodes=2``.
        passed_on: further options of sbatch from the user, which override them.
        variables: variables of the script; an empty value removes that of the submitting shell.
        arguments: arguments of the command, the recipe first.
    """

    options: list[str]
    passed_on: list[str]
    variables: dict[str, str]
    arguments: list[str]

    def script(self) -> str:
        """Return the batch script: the packaged one with this job's options, variables and arguments."""
        lines = packaged("slurm", "train").read_text(encoding="utf-8").splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith(_HEADER))
        code = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        header = [_HEADER + _quoted(option) for option in self.options]
        if self.passed_on:
            header.append(_HEADER + " ".join(map(_quoted, self.passed_on)))
        header += [line for line in lines[first:code] if not line.startswith(_HEADER)]
        settings = [f"unset {' '.join(name for name, value in self.variables.items() if not value)}"]
        settings += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items() if value]
        checkout = Path(alignment.__file__).resolve().parent.parent
        if not self.variables.get("ALIGNMENT_CONTAINER") and (checkout / "launch" / "train.py").is_file():
            settings.append(f"export PYTHONPATH={shlex.quote(str(checkout))}${{PYTHONPATH:+:$PYTHONPATH}}")
        return "\n".join([lines[0], *header, "", *settings, f"set -- {shlex.join(self.arguments)}", *lines[code:], ""])


def _quoted(option: str) -> str:
    """Quote a word of the header. sbatch reads quotes like a shell, but backslashes within them as well."""
    if "\\" in option or not option.isprintable():
        raise OptionError(f"{option!r}: sbatch does not support backslashes or line breaks; rename or remove it")
    return shlex.quote(option)


def check(job: Job) -> None:
    """Let sbatch judge whether the cluster could run a job, without submitting it; see :func:`call` for errors."""
    call("sbatch", "--test-only", *job.options, *job.passed_on, given=job.script())


def submit(job: Job, *options: str) -> str:
    """Submit a job, with further options of sbatch, and return its ID.

    All options are passed as arguments too: variables such as ``SBATCH_TIMELIMIT`` override the header of a script.

    Raises:
        SlurmError: see :func:`call`; or an option prevents sbatch from printing the ID.
    """
    answer = call("sbatch", "--parsable", *job.options, *job.passed_on, *options, given=job.script()).strip()
    number = answer.partition(";")[0]
    if not number.isdecimal():
        raise SlurmError(f"sbatch --parsable: expected the ID of the job, got {answer!r}; check `squeue --me`")
    return number


def call(*command: str, given: str = "") -> str:
    """Run a SLURM command with ``given`` as its input, and return its output.

    Raises:
        SlurmError: it is not available, does not respond, or fails.
    """
    called = " ".join(command[:2])
    try:
        done = subprocess.run(command, input=given, text=True, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        advice = "submit from a login node of the cluster, or show the script with --print"
        raise SlurmError(f"{command[0]}: {error.strerror}; {advice}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{called}: no response within {_TIMEOUT_S:g} s; check SLURM's controller") from None
    if done.returncode:
        said = "; ".join(filter(None, map(str.strip, done.stderr.splitlines()))) or f"exit status {done.returncode}"
        raise SlurmError(f"{called}: {said}")
    return done.stdout
