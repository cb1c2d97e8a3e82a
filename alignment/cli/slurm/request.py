"""The resources that a job requests, parsed from the command line and checked without contacting the cluster."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from alignment.cli.slurm.further import check_further
from alignment.config.errors import OptionError, did_you_mean

_EARLY = 60  # SLURM may send the signal of --signal up to this many seconds early
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME = re.compile(
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?"
    r"|(?P<hours>\d+):(?P<minutes2>\d+):(?P<seconds2>\d+)"
    r"|(?P<days>\d+)-(?P<hours3>\d+)(:(?P<minutes3>\d+)(:(?P<seconds3>\d+))?)?"
)
_SIGNALS = ("ABRT ALRM CONT HUP INT KILL PIPE QUIT STOP TERM TSTP TTIN TTOU URG USR1 USR2 XCPU").split()
_SEEDS = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_NAME = re.compile(r"[\w.@:+,\[\]-]+")


# Name, default, metavar, help.
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
_PLACE = (
    ("setup", "COMMANDS", "bash commands to run first, such as 'module load cuda/12.4'"),
    ("container", "IMAGE", "apptainer:IMAGE or pyxis:IMAGE; without a container, the job uses the current Python"),
    ("mounts", "FOLDER[:THERE],…", "folders to mount in the container in addition to the working directory"),
)


class Gpus(NamedTuple):
    """The GPUs of a node: their type (``""`` for any) and number."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" if self.kind else str(self.number)


@dataclass(frozen=True)
class Request:
    """A SLURM job. Strings are ``""`` for the cluster's default.

    Attributes:
        name: job name.
        nodes: number of nodes.
        gpus: GPUs per node; one task runs per GPU, or per node if there are none.
        cpus: cores per task.
        mem: memory per node, in SLURM's notation.
        time: time limit in seconds.
        notice: seconds before the time limit at which the run receives the signal.
        partition, account, qos: SLURM's names.
        seeds: array indices of a job array, in SLURM's notation.
        setup: commands to run before the job.
        container: ``apptainer:IMAGE`` or ``pyxis:IMAGE``.
        mounts: folders to mount in the container.
        sbatch: further sbatch options.
        run: the training job that this job prepares; None for a training job.
    """

    name: str = "alignment"
    nodes: int = 1
    gpus: Gpus = Gpus("", 1)
    cpus: int = 8
    mem: str = ""
    time: int = 4 * _HOUR
    notice: int = 120
    partition: str = ""
    account: str = ""
    qos: str = ""
    seeds: str = ""
    setup: str = ""
    container: str = ""
    mounts: str = ""
    sbatch: tuple[str, ...] = ()
    run: Request | None = None

    @property
    def command(self) -> str:
        """The command that the job runs."""
        return "train" if self.run is None else "prepare"

    @property
    def tasks(self) -> int:
        """Number of tasks per node."""
        return self.gpus.number or 1

    @property
    def first_seed(self) -> str:
        """The first seed of the job array."""
        return str(int(re.split(r"\D", self.seeds)[0]))

    def preparation(self, partition: str, time: int | None, sbatch: tuple[str, ...]) -> Request:
        """Return the job that prepares this one on a CPU node. Options that may be for GPU nodes are not inherited."""
        return dataclasses.replace(
            self,
            name=f"{self.name}-prepare",
            nodes=1,
            gpus=Gpus("", 0),
            mem="",
            partition=partition or self.partition,
            time=time or self.time,
            qos="",
            seeds="",
            sbatch=sbatch,
            run=self,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a job to the command's parser."""
    job = parser.add_argument_group("job")
    for name, default, metavar, text in _JOB:
        job.add_argument(*name.split(), default=default, metavar=metavar, help=text)
    job.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="further sbatch option, such as --sbatch=--constraint=ib; can be repeated",
    )
    place = parser.add_argument_group("environment (defaults: ALIGNMENT_SETUP, ALIGNMENT_CONTAINER, ALIGNMENT_MOUNTS)")
    for name, metavar, text in _PLACE:
        default = os.environ.get(f"ALIGNMENT_{name.upper()}", "")
        place.add_argument(f"--{name}", default=default, metavar=metavar, help=text)


def request(given: argparse.Namespace) -> Request:
    """Return the job that the options describe.

    Raises:
        OptionError: a value that SLURM would reject, or that would not have the intended effect.
    """
    found = Request(
        name=_name("--job-name", given.job_name),
        nodes=_number("--nodes", given.nodes, 1),
        gpus=_gpus(given.gpus),
        cpus=_number("--cpus-per-task", given.cpus_per_task, 1),
        mem=_mem(given.mem),
        time=seconds("--time", given.time),
        notice=_notice(given.signal),
        partition=_name("--partition", given.partition),
        account=_name("--account", given.account),
        qos=_name("--qos", given.qos),
        seeds=_seeds(given.seeds),
        setup=given.setup,
        container=_container(given.container),
        mounts=_mounts(given.mounts, given.container),
        sbatch=tuple(check_further("--sbatch", text) for text in given.sbatch),
    )
    if found.notice + _EARLY >= found.time:
        raise OptionError(
            f"--signal={given.signal}: leaves no time to train within --time={given.time}, because SLURM may send the "
            f"signal {_EARLY} s early; set a longer --time or fewer seconds"
        )
    return found


def seconds(option: str, text: str) -> int:
    """Parse a time in SLURM's notation: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        OptionError: not a valid time, or zero.
    """
    matched = _TIME.fullmatch(text)
    parts = {
        name.rstrip("23"): int(value) for name, value in (matched.groupdict() if matched else {}).items() if value
    }
    units = {"days": _DAY, "hours": _HOUR, "minutes": _MINUTE, "seconds": 1}
    total = sum(parts.get(name, 0) * unit for name, unit in units.items())
    if not total:
        raise OptionError(
            f"{option}={text!r}: expected minutes, HH:MM:SS or D-HH:MM:SS, such as 90, 04:00:00 or 1-00:00:00"
        )
    return total


def time_text(total: int) -> str:
    """Format seconds as ``D-HH:MM:SS``, or as ``HH:MM:SS`` if less than a day."""
    days, rest = divmod(total, _DAY)
    clock = f"{rest // _HOUR:02}:{rest % _HOUR // _MINUTE:02}:{rest % _MINUTE:02}"
    return f"{days}-{clock}" if days else clock


def _number(option: str, text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
        raise OptionError(f"{option}={text!r}: expected an integer of at least {least}")
    return int(text)


def _gpus(text: str) -> Gpus:
    matched = re.fullmatch(r"(?:([\w.+-]+):)?(\d{1,4})", text)
    if matched is None or (matched[1] and matched[2] == "0"):
        raise OptionError(f"--gpus={text!r}: expected the GPUs per node as NUMBER or TYPE:NUMBER, such as 8 or a100:8")
    return Gpus(matched[1] or "", int(matched[2]))


def _mem(text: str) -> str:
    if text and not re.fullmatch(r"\d+[KMGTkmgt]?", text):
        raise OptionError(f"--mem={text!r}: expected a size such as 500G, or 0 for all memory of a node")
    return text


def _notice(text: str) -> int:
    matched = re.fullmatch(r"(?:(?P<where>[A-Z]):)?(?:SIG)?(?P<name>[A-Za-z]\w*|\d+)(?:@(?P<notice>\d{1,5}))?", text)
    if matched is None:
        raise OptionError(f"--signal={text!r}: expected USR1@SECONDS, such as USR1@120")
    name, notice = matched["name"].upper(), matched["notice"]
    if name not in _SIGNALS and name != "10":
        raise OptionError(f"--signal={text!r}: unknown signal; set USR1@SECONDS{did_you_mean(name, _SIGNALS)}")
    if name not in ("USR1", "10"):
        raise OptionError(f"--signal={text!r}: a job requeues itself only after USR1; set USR1@{notice or 120}")
    if matched["where"]:
        raise OptionError(f"--signal={text!r}: the signal must go to the run itself; set USR1@{notice or 120}")
    if notice is None or not 0 < int(notice) < 2**16:
        raise OptionError(f"--signal={text!r}: expected the seconds before the time limit, such as USR1@120")
    return int(notice)


def _name(option: str, text: str) -> str:
    if text and not _NAME.fullmatch(text):
        raise OptionError(f"{option}={text!r}: expected a name without spaces or quotes")
    return text


def _seeds(text: str) -> str:
    if text and not _SEEDS.fullmatch(text):
        raise OptionError(
            f"--seeds={text!r}: expected integers and ranges, such as 1-5, 1,3,7 or 1-20%4 (four at a time)"
        )
    for first, last in re.findall(r"(\d+)-(\d+)", text):
        if int(first) > int(last):
            raise OptionError(f"--seeds={text!r}: {first}-{last} is empty; write the smaller number first")
    return text


def _container(text: str) -> str:
    if text and not re.fullmatch(r"(apptainer|pyxis):\S+", text):
        raise OptionError(f"--container={text!r}: expected apptainer:IMAGE or pyxis:IMAGE")
    return text


def _mounts(text: str, container: str) -> str:
    if text and not container:
        raise OptionError(f"--mounts={text!r}: has no effect without --container; set it or remove --mounts")
    return text
