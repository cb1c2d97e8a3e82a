"""The ``submit`` command: check the options of ``train`` and of the job, and submit the batch script to SLURM."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from alignment.cli.output import leave_with_help, surviving_closed_output
from alignment.cli.parsing import outside_method, parse, read_arguments, without_options
from alignment.cli.slurm.cluster import SlurmError, cancel, check_cluster, submit
from alignment.cli.slurm.further import OWN_OF_PREPARATION, check_further, names_option
from alignment.cli.slurm.request import Request, add_options, request, seconds
from alignment.cli.slurm.script import log_pattern, render
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import AlignmentError, OptionError, OutputError, counted, setting
from alignment.config.fields import SaveStrategy
from alignment.config.options import AlignmentConfig

_ABOUT = """\
Submit a training job to SLURM. Options that are not listed here are those of `train`. The recipe, the options and the
job are checked before submission. Shortly before its time limit, the run writes a checkpoint and the job requeues
itself to resume from it; after a node failure, SLURM requeues the job. To resume a run that ended early, run the same
command again."""

_INTERRUPTED = "interrupted while calling sbatch: check `squeue --me` for a submitted job"
_CTRL_C = 130


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises an OptionError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"command line: {message}; --help lists the options")


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment submit") -> None:
    """Submit a job, then exit with status 0, 1 after an error, or 130 after Ctrl-C.

    Args:
        argv: arguments without the program name. Defaults to those of this process.
        program: program name in usage lines.
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
        except KeyboardInterrupt:
            print("interrupted: nothing was submitted", file=sys.stderr)
            sys.exit(_CTRL_C)
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
    parser.add_argument(
        "--print", action="store_true", help="print the script without submitting it; works without SLURM"
    )
    add_options(parser)
    first = parser.add_argument_group("preparation job, which tokenizes the data and plans the run on a CPU node")
    first.add_argument(
        "--prepare", action="store_true", help="submit a preparation job; training starts if it succeeds"
    )
    first.add_argument("--prepare-partition", default="", metavar="NAME", help="its partition (that of --partition)")
    first.add_argument("--prepare-time", default="", metavar="D-HH:MM:SS", help="its time limit (that of --time)")
    first.add_argument(
        "--prepare-sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="further sbatch option for it; --sbatch, --qos and --mem apply to the training job only",
    )
    return parser


def _run(given: argparse.Namespace, rest: list[str], program: str) -> list[str]:
    """Submit the job and return the lines to print: how to follow and stop it, or the script with ``--print``."""
    job = request(given)
    preparing = _preparation(given, job)
    arguments, options = _arguments(rest, job)
    output_dir = Path(options.output_dir or "").absolute()
    jobs = [one for one in (preparing, job) if one is not None]
    scripts = [
        render(one, [*arguments, *_folder(one, options)], log=log_pattern(one, output_dir), folder=Path.cwd())
        for one in jobs
    ]
    if given.print:
        return _printed(scripts)
    for one in jobs:
        check_cluster(one)
    _make(output_dir.parent)
    return _told(jobs, _submitted(scripts), output_dir, program)


def _preparation(given: argparse.Namespace, job: Request) -> Request | None:
    if not given.prepare:
        for name in ("prepare_partition", "prepare_time", "prepare_sbatch"):
            if getattr(given, name):
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option}={getattr(given, name)!r}: has no effect without --prepare; add --prepare or remove it"
                )
        return None
    for text in job.sbatch:
        if names_option(text, "--dependency"):
            raise OptionError(
                f"--sbatch={text!r}: with --prepare, the job depends on the preparation job; set "
                f"--prepare-sbatch={text} instead"
            )
    return job.preparation(
        given.prepare_partition,
        seconds("--prepare-time", given.prepare_time) if given.prepare_time else None,
        tuple(check_further("--prepare-sbatch", text, OWN_OF_PREPARATION) for text in given.prepare_sbatch),
    )


def _arguments(rest: list[str], job: Request) -> tuple[list[str], AlignmentConfig]:
    """Return the arguments of ``train`` without the output folder, and the parsed options."""
    with _own_environment():
        _, given = read_arguments(rest, outside_method(rest).values())
        if given.get("hub_token"):
            raise OptionError(
                "--hub_token=<hidden>: SLURM stores the job's script, where other users may read it; remove it and "
                "run `hf auth login` or set HF_TOKEN"
            )
        if job.seeds and "seed" in given:
            raise OptionError(f"--seed={given['seed']}: --seeds sets the seed of each run; remove --seed")
        with planning_for(Machine(job.nodes * job.tasks, cuda=bool(job.gpus.number))):
            options = parse(rest)
    if options.overwrite_output_dir:
        raise OptionError(
            "overwrite_output_dir=true: a requeued job resumes its own run, which this option would move away; "
            "remove it, and move the earlier run or choose another output_dir"
        )
    if job.seeds and options.merged_output_dir is not None:
        raise OptionError(
            f"{setting('merged_output_dir', options.merged_output_dir)}: all runs of --seeds would write to this "
            "folder; remove it, and merge the best run with deepspeed-alignment export"
        )
    _check_goes_on(options)
    kept = without_options(rest, ("output_dir", "resume_from_checkpoint"))
    resume = options.resume_from_checkpoint  # a recipe may set it as well; the script itself passes `latest`
    if resume is None or resume is True:
        return kept, options
    return [*kept, "--resume_from_checkpoint", resume or "false"], options


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Undo changes of the environment within this context: imports of third-party methods must not affect the job."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check_goes_on(options: AlignmentConfig) -> None:
    for name, unusable, usable in (("save_strategy", SaveStrategy.NO, "steps"), ("save_only_model", True, "false")):
        if getattr(options, name) == unusable:
            raise OptionError(
                f"{setting(name, unusable)}: a requeued job resumes from its newest checkpoint, and there would be "
                f"none to resume from; set {name}: {usable}"
            )


def _folder(job: Request, options: AlignmentConfig) -> list[str]:
    """Return the output folder argument of a job; if it prepares several seeds, that of the first one."""
    folder = options.output_dir or ""
    if job.run is not None and job.run.seeds:
        first = job.run.first_seed
        return ["--seed", first, "--output_dir", str(Path(folder) / f"seed-{first}")]
    return ["--output_dir", folder]


def _submitted(scripts: list[str]) -> list[str]:
    """Submit the jobs and return their ids. If one is rejected, cancel the jobs submitted before it."""
    numbers: list[str] = []
    try:
        for script in scripts:
            after = [f"--dependency=afterok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
            numbers.append(submit(script, *after))
    except KeyboardInterrupt:
        print("; ".join([_INTERRUPTED, *map(_cancelled, numbers)]), file=sys.stderr)
        sys.exit(_CTRL_C)
    except AlignmentError as error:
        raise SlurmError("; ".join([str(error), *map(_cancelled, numbers)])) from None
    return numbers


def _cancelled(number: str) -> str:
    """Cancel the preparation job of a training job that was not submitted."""
    try:
        cancel(number)
    except SlurmError as error:
        return f"could not cancel its preparation job {number} ({error}); run scancel {number}"
    return f"its preparation job {number} was cancelled"


def _printed(scripts: list[str]) -> list[str]:
    if len(scripts) == 1:
        return [scripts[0].rstrip()]
    first, second = (script.rstrip() for script in scripts)
    return [
        first,
        "",
        "# The training job: sbatch --dependency=afterok:PREPARATION_JOB_ID --kill-on-invalid-dep=yes",
        "",
        second,
    ]


def _make(folder: Path) -> None:
    """Create the folder of the job's log; SLURM would discard the output otherwise."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"output_dir: {folder} cannot be created: {error.strerror or error}; choose another one"
        ) from None


def _told(jobs: list[Request], numbers: list[str], output_dir: Path, program: str) -> list[str]:
    """Return how to follow, stop and resume the submitted job."""
    job, number = jobs[-1], numbers[-1]
    folder = shlex.quote(str(output_dir / "seed-N" if job.seeds else output_dir))
    log = shlex.quote(str(log_pattern(job, output_dir)).replace("%A", number).replace("%a", "N").replace("%j", number))
    status = program.replace("submit", "status")
    asked = counted(job.nodes, "node")
    if job.gpus.number:
        asked += f" with {counted(job.gpus.number, f'{job.gpus.kind} GPU'.strip())} each"
    seeds = f", seeds {job.seeds}" if job.seeds else ""
    lines = [f"submitted job {number}: {asked}{seeds}"]
    if len(jobs) > 1:
        lines.append(f"  after    preparation job {numbers[0]}")
    return [
        *lines,
        f"  follow   {'python ' if status.endswith('.py') else ''}{status} {folder}",
        f"  log      tail -F {log}",
        f"  stop     touch {folder}/STOP    (saves a checkpoint)",
        f"  cancel   scancel {number}    (saves a checkpoint if SLURM's KillWait is long enough)",
        "  resume   run the same command again",
    ]
