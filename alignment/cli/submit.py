"""The ``submit`` command: check the options of ``train``, let sbatch judge the job, and submit it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment.cli.output import print_and_leave, surviving_closed_output
from alignment.cli.parsing import Parser, parse, read_arguments
from alignment.cli.slurm import Job, SlurmError, call, check, submit
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import AlignmentError, OptionError, OutputError, counted, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import check_exists, mixture_parts

_ABOUT = """\
Submit a training job to SLURM. Options that are not listed here are those of `train`; options after `--` are passed
to sbatch. The recipe, the options and the job are checked before submission. Shortly before its time limit, the run
writes a checkpoint and the job requeues itself to resume from it; after a node failure, SLURM requeues the job. To
resume a run that ended early, run the same command again."""

# Option, default, metavar, help.
_JOB = (
    ("--nodes", "1", "N", "number of nodes (1)"),
    ("--gpus", "1", "[TYPE:]N", "GPUs per node, one rank per GPU (1); 0 for one rank per node on the CPU"),
    ("--cpus-per-task", "8", "N", "cores per rank (8)"),
    ("--mem", "", "SIZE", "memory per node, such as 500G; 0 for all memory of the node"),
    ("--time", "04:00:00", "D-HH:MM:SS", "time limit of an attempt (04:00:00)"),
    ("--signal", "USR1@120", "USR1@SECONDS", "checkpoint and requeue this long before the time limit (USR1@120)"),
    ("--partition", "", "NAME", "partition to submit to, or several as A,B"),
    ("--account", "", "NAME", "account to charge"),
    ("--qos", "", "NAME", "quality of service"),
    ("--job-name", "alignment", "NAME", "name of the job (alignment)"),
    ("--seeds --array", "", "1-5", "one run per seed, in OUTPUT_DIR/seed-N; 1-5%%2 for two at a time"),
)
_ENVIRONMENT = (
    ("setup", "COMMANDS", "bash commands to run first, such as 'module load cuda/12.4'"),
    ("container", "IMAGE", "apptainer:IMAGE or pyxis:IMAGE; without a container, the job uses the current Python"),
    ("mounts", "FOLDER[:THERE],…", "folders to mount in the container in addition to the working directory"),
)
# What this command has to understand: pattern and description of a value. sbatch checks everything else.
_VALUES = {
    "nodes": (r"[1-9]\d{0,5}", "an integer of at least 1"),
    "gpus": (r"\d{1,4}|[^\s:]+:[1-9]\d{0,3}", "the GPUs per node as NUMBER or TYPE:NUMBER, such as 8 or a100:8"),
    "signal": (r"USR1@[1-9]\d{0,4}", "USR1@SECONDS, such as USR1@120; a job requeues itself only after USR1"),
    "container": (r"((apptainer|pyxis):\S+)?", "apptainer:IMAGE or pyxis:IMAGE"),
}
_NO_RESUME = "a requeued job resumes from its newest checkpoint, and there would be none to resume from; set"
# Options of a run that a job cannot have: value and reason.
_UNUSABLE = {
    "overwrite_output_dir": (True, "a requeued job resumes its own run, which this option would move away; remove it"),
    "save_strategy": ("no", f"{_NO_RESUME} save_strategy: steps"),
    "dry_run": (True, "the job would not train; use --print to see its script, and train --dry_run to check the run"),
    "save_only_model": (True, f"{_NO_RESUME} save_only_model: false"),
}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment submit") -> None:
    """Submit a job, then exit with status 0, 1 after an error, or 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser(program)
    if not {"-h", "--help"}.isdisjoint(arguments[:end]):
        print_and_leave(parser.format_help().rstrip())
    code = 0
    with surviving_closed_output():
        try:
            given, rest = parser.parse_known_args(arguments[:end])
            given.sbatch = [*given.sbatch, *arguments[end + 1 :]]
            print("\n".join(_run(given, rest, program)), flush=True)
        except AlignmentError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            print("interrupted: check `squeue --me` for a submitted job", file=sys.stderr)
            code = 130
    sys.exit(code)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        usage=f"{program} RECIPE [--nodes N] [--gpus N] [--time D-HH:MM:SS] [--OPTION VALUE ...] [-- SBATCH ...]",
        description=_ABOUT,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=119),
    )
    more: dict[str, Any] = {"action": "extend", "type": shlex.split, "default": [], "metavar": "OPTION"}
    add = parser.add_argument
    add("--print", action="store_true", help="print the script without submitting it; works without SLURM")
    add = parser.add_argument_group("job").add_argument
    for names, default, metavar, text in _JOB:
        add(*names.split(), default=default, metavar=metavar, help=text)
    add("--sbatch", **more, help="further sbatch option, such as --sbatch=--constraint=ib; can be repeated")
    add = parser.add_argument_group("environment (each defaults to its variable, ALIGNMENT_SETUP …)").add_argument
    for name, metavar, text in _ENVIRONMENT:
        add(f"--{name}", default=os.environ.get(f"ALIGNMENT_{name.upper()}", ""), metavar=metavar, help=text)
    group = "preparation job, which tokenizes the data and plans the run on a CPU node"
    add = parser.add_argument_group(group).add_argument
    add("--prepare", action="store_true", help="submit a preparation job; training starts if it succeeds")
    add("--prepare-partition", default="", metavar="NAME", help="its partition (that of --partition)")
    add("--prepare-time", default="", metavar="D-HH:MM:SS", help="its time limit (that of --time)")
    add("--prepare-sbatch", **more, help="further sbatch option for it; --sbatch, --qos and --mem do not apply to it")
    return parser


def _run(given: Namespace, rest: list[str], program: str) -> list[str]:
    """Submit the job and return the lines to print: how to follow and stop it, or the script with ``--print``."""
    _check_values(given)
    arguments, options = _arguments(rest, given)
    output_dir = Path(options.output_dir or "")
    jobs = [_job(given, given, [*arguments, "--output_dir", str(output_dir)], output_dir.absolute())]
    if given.prepare:
        jobs.insert(0, _preparation(given, arguments, output_dir))
    if given.print:
        after = "\n\n# The training job: sbatch --dependency=afterok:PREPARATION_JOB_ID --kill-on-invalid-dep=yes\n\n"
        return [after.join(job.script().rstrip() for job in jobs)]
    if not given.container:  # which may have other paths
        parts = [] if options.dataset_mixture is None else mixture_parts(options.dataset_mixture)
        for name in filter(None, (options.dataset_name, *(part.dataset_name for part in parts))):
            check_exists(name)
    for job in jobs:
        check(job)
    folder = output_dir.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)  # of the log; SLURM would discard the output otherwise
    except OSError as error:
        raise OutputError(f"output_dir: {folder} cannot be created: {error.strerror}; choose another one") from None
    return _told(given, _submit(jobs), output_dir.absolute(), program)


def _check_values(given: Namespace) -> None:
    for name, (pattern, expected) in _VALUES.items():
        if not re.fullmatch(pattern, value := getattr(given, name)):
            raise OptionError(f"--{name}={value!r}: expected {expected}")
    for name, value in vars(given).items():
        if value and name.startswith("prepare_") and not given.prepare:
            option = f"--{name.replace('_', '-')}={value!r}"
            raise OptionError(f"{option}: has no effect without --prepare; add --prepare or remove it")
    if given.mounts and not given.container:
        raise OptionError(f"--mounts={given.mounts!r}: has no effect without --container; set it or remove --mounts")
    if given.prepare and any(word.startswith(("-d", "--dep")) for word in given.sbatch):
        raise OptionError(
            f"--sbatch={shlex.join(given.sbatch)!r}: with --prepare, the job depends on the preparation job; set "
            "the dependency with --prepare-sbatch"
        )


def _arguments(rest: list[str], job: Namespace) -> tuple[list[str], AlignmentConfig]:
    """Return the arguments of ``train``, and the parsed options."""
    _, given = read_arguments(rest)
    if given.get("hub_token"):
        raise OptionError(
            "--hub_token=<hidden>: SLURM stores the job's script, where other users may read it; remove it and run "
            "`hf auth login` or set HF_TOKEN"
        )
    if job.seeds and "seed" in given:
        raise OptionError(f"--seed={given['seed']}: --seeds sets the seed of each run; remove --seed")
    before = dict(os.environ)
    with planning_for(Machine(_ranks(job), cuda=_gpus(job) > 0)):
        options = parse(rest)
    for name in {*os.environ} - {*before}:  # the job's environment, to which importing an outside method may add
        del os.environ[name]
    for name, (value, reason) in _UNUSABLE.items():
        if getattr(options, name) == value:
            raise OptionError(f"{setting(name, value)}: {reason}")
    if job.seeds and options.merged_output_dir is not None:
        raise OptionError(
            f"{setting('merged_output_dir', options.merged_output_dir)}: all runs of --seeds would write to this "
            "folder; remove it, and merge the best run with deepspeed-alignment export"
        )
    resume = options.resume_from_checkpoint
    if resume in (None, "latest"):
        return rest, options
    return [*rest, "--resume_from_checkpoint", resume or "false"], options  # the script may not find it in the recipe


def _preparation(given: Namespace, arguments: list[str], output_dir: Path) -> Job:
    """Return the job that prepares the run on a CPU node, without the options that may be meant for GPU nodes."""
    own = {
        "job_name": f"{given.job_name}-prepare", "nodes": "1", "gpus": "0", "sbatch": given.prepare_sbatch,
        "partition": given.prepare_partition or given.partition, "time": given.prepare_time or given.time,
        "mem": "", "qos": "", "seeds": "",
    }  # fmt: skip
    folder = output_dir
    if given.seeds:  # that of the first run: the common parent folder could not be prepared a second time
        seed = str(int(re.split(r"\D", given.seeds)[0] or 0))
        arguments, folder = [*arguments, "--seed", seed], output_dir / f"seed-{seed}"
    arguments = [*arguments, "--output_dir", str(folder), "--ranks", str(_ranks(given))]
    return _job(Namespace(**{**vars(given), **own}), given, arguments, output_dir.absolute())


def _job(own: Namespace, run: Namespace, arguments: list[str], output_dir: Path) -> Job:
    """Return the job with these options of its ``own``; it prepares the ``run`` with those, or they are the same."""
    trains = own is run
    # Next to the output folder, not in it, because it must be empty at first.
    log = f"{str(output_dir).replace('%', '%%')}-{'%A_%a' if own.seeds else '%j' if trains else 'prepare-%j'}.out"
    options = {
        "job-name": own.job_name,
        "nodes": own.nodes,
        "ntasks-per-node": _ranks(own) // int(own.nodes),
        "gpus-per-node": own.gpus if _gpus(own) else "",
        "cpus-per-task": own.cpus_per_task,
        "mem": own.mem,
        "time": own.time,
        "partition": own.partition,
        "account": own.account,
        "qos": own.qos,
        "array": own.seeds,
        "signal": own.signal if trains else "",
        "chdir": Path.cwd(),
        "output": log,
    }
    variables = {
        "ALIGNMENT_SETUP": run.setup,
        "ALIGNMENT_CONTAINER": run.container,
        "ALIGNMENT_MOUNTS": run.mounts,
        "ALIGNMENT_PYTHON": os.environ.get("ALIGNMENT_PYTHON") or ("" if run.container else sys.executable),
        "ALIGNMENT_COMMAND": "train" if trains else "prepare",
        "ALIGNMENT_STOP_NOTICE": run.signal.partition("@")[2] if trains else "",
        **({} if _gpus(run) else {"DS_ACCELERATOR": "cpu"}),
    }
    given = [f"--{name}={value}" for name, value in options.items() if value != ""]
    return Job([*given, "--requeue", "--open-mode=append"], own.sbatch, variables, arguments)


def _gpus(given: Namespace) -> int:
    return int(given.gpus.rpartition(":")[2])


def _ranks(given: Namespace) -> int:
    """Return the number of ranks: one per GPU, or per node if it has none."""
    return int(given.nodes) * (_gpus(given) or 1)


def _submit(jobs: list[Job]) -> list[str]:
    """Submit the jobs, each after the one before, and return their IDs; if one is rejected, cancel the others."""
    numbers: list[str] = []
    try:
        for job in jobs:
            after = [f"--dependency=afterok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
            numbers.append(submit(job, *after))
    except (SlurmError, KeyboardInterrupt):
        for number in numbers:
            print(f"cancelling the preparation job: scancel {number}", file=sys.stderr)
            call("scancel", number)
        raise
    return numbers


def _told(given: Namespace, numbers: list[str], output_dir: Path, program: str) -> list[str]:
    """Return how to follow, stop and resume the submitted job."""
    *before, number = numbers
    folder = shlex.quote(str(output_dir / "seed-N" if given.seeds else output_dir))
    log = shlex.quote(f"{output_dir}-{number}{'_N' if given.seeds else ''}.out")
    status = program.replace("submit", "status")
    gpus = f" with {counted(_gpus(given), 'GPU')} each" if _gpus(given) else ""
    seeds = f", seeds {given.seeds}" if given.seeds else ""
    return [
        f"submitted job {number}: {counted(int(given.nodes), 'node')}{gpus}{seeds}",
        *(f"  after    preparation job {first}" for first in before),
        f"  follow   {'python ' if status.endswith('.py') else ''}{status} {folder}",
        f"  log      tail -F {log}",
        f"  stop     touch {folder}/STOP    (saves a checkpoint)",
        f"  cancel   scancel {number}    (saves a checkpoint if SLURM's KillWait is long enough)",
        "  resume   run the same command again",
    ]
