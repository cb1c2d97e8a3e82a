"""The command ``submit``: checks the options of ``train`` and of a job, and hands SLURM the batch script they make."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from alignment.cli.output import leave_with_help, surviving_closed_output
from alignment.cli.parsing import parse, read_arguments
from alignment.cli.slurm.cluster import check_cluster, submit
from alignment.cli.slurm.request import Request, add_options, request, seconds
from alignment.cli.slurm.script import log_pattern, render
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import AlignmentError, OptionError, OutputError
from alignment.config.options import AlignmentConfig

_ABOUT = """\
Submit training as a job of SLURM. Options that are not listed here are those of `train`. Recipe, options and the job
are checked first. Near its time limit the run writes a checkpoint, and the job requeues itself and goes on from there;
after a node failure SLURM requeues it. The same command again resumes a run that has ended early."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"command line: {message}; --help lists the options")


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment submit") -> None:
    """Submit a job and exit with the code: 0, or 1 after an error.

    Args:
        argv: arguments without the program's name; those of this process when None.
        program: what usage lines call this command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(program)
    leave_with_help(parser, arguments)
    with surviving_closed_output():
        try:
            lines = _run(*parser.parse_known_args(arguments), program)
        except AlignmentError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        print("\n".join(lines), flush=True)
    sys.exit(0)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=f"{program} RECIPE [--nodes N] [--gpus N] [--time D-HH:MM:SS] [--OPTION VALUE ...]",
        description=_ABOUT,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=119),
    )
    parser.add_argument("--print", action="store_true", help="print the script and submit nothing; needs no SLURM")
    add_options(parser)
    first = parser.add_argument_group("a job before it, which tokenises and plans on a node without GPUs")
    first.add_argument("--prepare", action="store_true", help="submit both; training waits for the other to succeed")
    first.add_argument("--prepare-partition", default="", metavar="NAME", help="default: that of --partition")
    first.add_argument("--prepare-time", default="", metavar="D-HH:MM:SS", help="default: that of --time")
    return parser


def _run(given: argparse.Namespace, rest: list[str], program: str) -> list[str]:
    """What to print: the script, or where the job that was submitted can be followed and stopped."""
    job = request(given)
    preparing = _preparation(given, job)
    arguments, options = _arguments(rest, job)
    output_dir = Path(options.output_dir or "").expanduser().absolute()
    jobs = [one for one in (preparing, job) if one is not None]
    scripts = [render(one, arguments, log=log_pattern(one, output_dir), folder=Path.cwd()) for one in jobs]
    if given.print:
        return _printed(scripts)
    for one in jobs:
        check_cluster(one)
    _make(output_dir.parent)
    numbers: list[str] = []
    for script in scripts:
        after = [f"--dependency=afterok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
        numbers.append(submit(script, *after))
    return _told(jobs, numbers, output_dir, program)


def _preparation(given: argparse.Namespace, job: Request) -> Request | None:
    if not given.prepare:
        for name in ("prepare_partition", "prepare_time"):
            if getattr(given, name):
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option}={getattr(given, name)!r}: there is no such job; add --prepare or remove it"
                )
        return None
    return job.preparation(
        given.prepare_partition, seconds("--prepare-time", given.prepare_time) if given.prepare_time else None
    )


def _arguments(rest: list[str], job: Request) -> tuple[list[str], AlignmentConfig]:
    """The arguments of ``train``, and the options that they amount to."""
    _, named = read_arguments(rest)
    if job.seeds and "seed" in named:
        raise OptionError(f"--seed={named['seed']}: --seeds gives each run its own; remove --seed")
    # As the script does: a run goes on from its newest checkpoint.
    resumed = [] if "resume_from_checkpoint" in named else ["--resume_from_checkpoint", "latest"]
    try:
        with planning_for(Machine(job.nodes * job.tasks, cuda=bool(job.gpus.number))):
            options = parse([*rest, *resumed])
    except OptionError as error:
        if resumed and str(error).startswith("resume_from_checkpoint="):
            raise OptionError(
                "overwrite_output_dir=true: a job goes on with its own run when it is requeued, and would move that "
                "away; remove it, and move the earlier run or choose another output_dir"
            ) from None
        raise
    return [*rest, *([] if "output_dir" in named else ["--output_dir", str(options.output_dir)])], options


def _printed(scripts: list[str]) -> list[str]:
    if len(scripts) == 1:
        return [scripts[0].rstrip()]
    first, second = (script.rstrip() for script in scripts)
    return [
        first,
        "",
        "# The second job: sbatch --dependency=afterok:NUMBER_OF_THE_FIRST --kill-on-invalid-dep=yes",
        "",
        second,
    ]


def _make(folder: Path) -> None:
    """SLURM discards the output of a job whose log has no folder to be in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"output_dir: {folder} cannot be made: {error.strerror or error}; choose another one"
        ) from None


def _told(jobs: list[Request], numbers: list[str], output_dir: Path, program: str) -> list[str]:
    """How to follow, stop and resume what was submitted."""
    job, number = jobs[-1], numbers[-1]
    folder = shlex.quote(str(output_dir / "seed-N" if job.seeds else output_dir))
    log = shlex.quote(str(log_pattern(job, output_dir)).replace("%A", number).replace("%a", "N").replace("%j", number))
    status = program.replace("submit", "status")
    asked = f"{job.nodes} node(s) with {job.gpus} GPU(s) each" if job.gpus.number else f"{job.nodes} node(s)"
    seeds = f", seeds {job.seeds}" if job.seeds else ""
    lines = [f"submitted job {number}: {asked}{seeds}"]
    if len(jobs) > 1:
        lines.append(f"  after    job {numbers[0]}, which prepares its data")
    return [
        *lines,
        f"  follow   {'python ' if status.endswith('.py') else ''}{status} {folder}",
        f"  log      tail -F {log}",
        f"  stop     touch {folder}/STOP    (with a checkpoint)",
        f"  cancel   scancel {number}    (with a checkpoint, if it can be written within SLURM's KillWait)",
        "  resume   the same command again",
    ]
