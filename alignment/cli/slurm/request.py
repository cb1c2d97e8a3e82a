"""What a job asks of SLURM, read from the command line and checked without asking the cluster."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from alignment.cli.slurm.further import check_further
from alignment.config.errors import OptionError, did_you_mean

_EARLY = 60  # seconds by which SLURM may send the signal of --signal too early
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME = re.compile(
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?"
    r"|(?P<hours>\d+):(?P<minutes2>\d+):(?P<seconds2>\d+)"
    r"|(?P<days>\d+)-(?P<hours3>\d+)(:(?P<minutes3>\d+)(:(?P<seconds3>\d+))?)?"
)
_SIGNALS = ("ABRT ALRM CONT HUP INT KILL PIPE QUIT STOP TERM TSTP TTIN TTOU URG USR1 USR2 XCPU").split()
_SEEDS = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_NAME = re.compile(r"[\w.@:+,\[\]-]+")


# Name, default, what it takes, help.
_JOB = (
    ("--nodes", "1", "N", "number of nodes (1)"),
    ("--gpus", "1", "[TYPE:]N", "GPUs of each node, one rank per GPU (1); 0 for one rank per node, on the CPU"),
    ("--cpus-per-task", "8", "N", "cores per rank (8)"),
    ("--mem", "", "SIZE", "memory per node, such as 500G; 0 for all of it"),
    ("--time", "04:00:00", "D-HH:MM:SS", "time limit of an attempt (04:00:00)"),
    ("--signal", "USR1@120", "USR1@SECONDS", "how long before that to write a checkpoint and requeue (USR1@120)"),
    ("--partition", "", "NAME", "where to run; several as A,B"),
    ("--account", "", "NAME", "who pays"),
    ("--qos", "", "NAME", "quality of service"),
    ("--job-name", "alignment", "NAME", "the job's name (alignment)"),
    ("--seeds --array", "", "1-5", "a run for each seed, in OUTPUT_DIR/seed-N; 1-5%%2 for two at a time"),
)
_PLACE = (
    ("setup", "COMMANDS", "bash to run first, such as 'module load cuda/12.4'"),
    ("container", "IMAGE", "apptainer:IMAGE or pyxis:IMAGE; without one, the Python that runs this command is used"),
    ("mounts", "FOLDER[:THERE],…", "what the container sees beside the working directory"),
)


class Gpus(NamedTuple):
    """GPUs of a node: their kind, ``""`` for any, and how many."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" if self.kind else str(self.number)


@dataclass(frozen=True)
class Request:
    """A job. Texts are ``""`` where the cluster's default is meant.

    Attributes:
        name: of the job.
        nodes: how many.
        gpus: of each node; one task runs per GPU, and one per node without any.
        cpus: cores per task.
        mem: memory per node, as SLURM writes it.
        time: limit in seconds.
        notice: seconds before that at which the run is signalled.
        partition, account, qos: as SLURM knows them.
        seeds: of a job array, as SLURM writes its numbers.
        setup: commands to run before the job.
        container: ``apptainer:IMAGE`` or ``pyxis:IMAGE``.
        mounts: folders that the container sees.
        sbatch: further options of sbatch.
        run: the job that this one prepares; None if it trains.
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
        """What it runs."""
        return "train" if self.run is None else "prepare"

    @property
    def tasks(self) -> int:
        """Tasks per node."""
        return self.gpus.number or 1

    @property
    def first_seed(self) -> str:
        """Of the job array."""
        return str(int(re.split(r"\D", self.seeds)[0]))

    def preparation(self, partition: str, time: int | None, sbatch: tuple[str, ...]) -> Request:
        """The job that prepares this one on a node without GPUs. What may be meant for GPU nodes is not taken over."""
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
    job = parser.add_argument_group("the job")
    for name, default, metavar, text in _JOB:
        job.add_argument(*name.split(), default=default, metavar=metavar, help=text)
    job.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of sbatch, such as --sbatch=--constraint=ib; may be repeated",
    )
    place = parser.add_argument_group("its environment; the defaults are those of ALIGNMENT_SETUP … in this one")
    for name, metavar, text in _PLACE:
        default = os.environ.get(f"ALIGNMENT_{name.upper()}", "")
        place.add_argument(f"--{name}", default=default, metavar=metavar, help=text)


def request(given: argparse.Namespace) -> Request:
    """The job that the options ask for.

    Raises:
        OptionError: a value that SLURM would not take, or that would not do what was meant.
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
            f"--signal={given.signal}: nothing would be left of --time={given.time}, for SLURM may send the signal "
            f"{_EARLY} s early; set a longer --time or fewer seconds"
        )
    return found


def seconds(option: str, text: str) -> int:
    """A time as SLURM writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        OptionError: it is none, or it is zero.
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
    """Seconds as ``D-HH:MM:SS``, or ``HH:MM:SS`` below a day."""
    days, rest = divmod(total, _DAY)
    clock = f"{rest // _HOUR:02}:{rest % _HOUR // _MINUTE:02}:{rest % _MINUTE:02}"
    return f"{days}-{clock}" if days else clock


def _number(option: str, text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
        raise OptionError(f"{option}={text!r}: expected a whole number from {least}")
    return int(text)


def _gpus(text: str) -> Gpus:
    matched = re.fullmatch(r"(?:([\w.+-]+):)?(\d{1,4})", text)
    if matched is None or (matched[1] and matched[2] == "0"):
        raise OptionError(
            f"--gpus={text!r}: expected the GPUs of each node as a number or TYPE:NUMBER, such as 8 or a100:8"
        )
    return Gpus(matched[1] or "", int(matched[2]))


def _mem(text: str) -> str:
    if text and not re.fullmatch(r"\d+[KMGTkmgt]?", text):
        raise OptionError(f"--mem={text!r}: expected a size such as 500G, or 0 for all of a node's memory")
    return text


def _notice(text: str) -> int:
    matched = re.fullmatch(r"(?:(?P<where>[A-Z]):)?(?:SIG)?(?P<name>[A-Za-z]\w*|\d+)(?:@(?P<notice>\d{1,5}))?", text)
    if matched is None:
        raise OptionError(f"--signal={text!r}: expected USR1@SECONDS, such as USR1@120")
    name, notice = matched["name"].upper(), matched["notice"]
    if name not in _SIGNALS and name != "10":
        raise OptionError(f"--signal={text!r}: no such signal{did_you_mean(name, _SIGNALS)}; set USR1@SECONDS")
    if name not in ("USR1", "10"):
        raise OptionError(f"--signal={text!r}: a job requeues itself after USR1 only; set USR1@{notice or 120}")
    if matched["where"]:
        raise OptionError(f"--signal={text!r}: the run itself has to get the signal; set USR1@{notice or 120}")
    if notice is None or not 0 < int(notice) < 2**16:
        raise OptionError(f"--signal={text!r}: how many seconds before the time limit? set USR1@120")
    return int(notice)


def _name(option: str, text: str) -> str:
    if text and not _NAME.fullmatch(text):
        raise OptionError(f"{option}={text!r}: expected a name without spaces or quotes")
    return text


def _seeds(text: str) -> str:
    if text and not _SEEDS.fullmatch(text):
        raise OptionError(
            f"--seeds={text!r}: expected numbers and ranges, such as 1-5, 1,3,7 or 1-20%4 (four at a time)"
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
        raise OptionError(f"--mounts={text!r}: there is no container; set --container or remove it")
    return text
