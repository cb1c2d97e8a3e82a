"""What SLURM answers: its partitions, whether a job fits one, and the number of a job that was submitted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

from alignment.cli.slurm.further import named, variables_of
from alignment.cli.slurm.request import Request, seconds, time_text
from alignment.cli.slurm.script import HEADER
from alignment.config.errors import AlignmentError, OptionError, did_you_mean

_LIMIT_S = 60.0  # for an answer
_PARTITION = "SBATCH_PARTITION"
# What a request says also where its header has no line for it.
_SAID = (
    "--array",
    "--cpus-per-gpu",
    "--gpus",
    "--gpus-per-node",
    "--gpus-per-task",
    "--no-requeue",
    "--signal",
    "--wait",
)


class SlurmError(AlignmentError):
    """SLURM is not there, does not answer, or refuses a job."""


class Node(NamedTuple):
    """What nodes of one kind have: cores, and GPUs by their type."""

    cpus: int
    gpus: dict[str, int]

    def has(self, kind: str) -> int:
        """GPUs of this type, of any if it is ``""``."""
        return sum(count for name, count in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition: most nodes of a job and longest time in seconds, None where it sets no limit."""

    name: str
    nodes: int
    time: int | None
    up: bool
    default: bool


def check_cluster(job: Request) -> None:
    """Compare a job with the partition that it names, or with the default one.

    Raises:
        OptionError: it asks for more than there is.
        SlurmError: there is no SLURM here, or it does not answer.
    """
    if shutil.which("sbatch") is None:
        raise SlurmError(
            "sbatch is not on PATH: submit from a login node of the cluster, or see the script by --print"
        )
    known = {one.name: one for one in read_partitions(ask("scontrol", "show", "partition", "--oneliner"))}
    given, option = job.partition, "--partition"
    if not given:
        given, option = os.environ.get(_PARTITION, ""), _PARTITION
    names = given.split(",") if given else [one.name for one in known.values() if one.default]
    if not names:
        raise OptionError(f"--partition is missing, and no partition is the default; there are: {', '.join(known)}")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OptionError(f"{option}={name!r}: no such partition{hint}; there are: {', '.join(known)}")
        _check_partition(job, known[name])
        _check_nodes(job, name, read_nodes(ask("sinfo", "--noheader", "--partition", name, "--format", "%c|%G")))


def _check_partition(job: Request, partition: Partition) -> None:
    where = f"the partition {partition.name}"
    if not partition.up:
        raise OptionError(f"--partition={partition.name!r}: it is not up; choose another one")
    if job.nodes > partition.nodes:
        raise OptionError(
            f"--nodes={job.nodes}: {where} has {partition.nodes} for a job; set --nodes {partition.nodes}"
        )
    if partition.time is not None and job.time > partition.time:
        longest = time_text(partition.time)
        raise OptionError(f"--time={time_text(job.time)}: {where} allows {longest}; the job requeues itself there")


def _check_nodes(job: Request, partition: str, nodes: list[Node]) -> None:
    where = f"the nodes of partition {partition}"
    most = max((node.has(job.gpus.kind) for node in nodes), default=0)
    if job.gpus.number > most:
        kinds = sorted({name for node in nodes for name in node.gpus if name})
        typed = f" of type {job.gpus.kind}" if job.gpus.kind else ""
        others = f"; its types are {', '.join(kinds)}" if typed and kinds else ""
        raise OptionError(f"--gpus={job.gpus}: {where} have at most {most}{typed}{others}; set --gpus for one node")
    cores = max((node.cpus for node in nodes if node.has(job.gpus.kind) >= job.gpus.number), default=0)
    if job.cpus * job.tasks > cores:
        raise OptionError(
            f"--cpus-per-task={job.cpus}: {job.tasks} ranks of a node take {job.cpus * job.tasks} cores, and {where} "
            f"have {cores}; set --cpus-per-task {max(1, cores // job.tasks)}"
        )


def read_partitions(answer: str) -> list[Partition]:
    """The partitions that ``scontrol show partition --oneliner`` lists."""
    found = []
    for line in answer.splitlines():
        said = dict(part.partition("=")[::2] for part in line.split())
        if "PartitionName" not in said:
            continue
        limits = [int(said[key]) for key in ("MaxNodes", "TotalNodes") if said.get(key, "").isdecimal()]
        time = said.get("MaxTime", "UNLIMITED")
        found.append(
            Partition(
                name=said["PartitionName"],
                nodes=min(limits, default=0),
                time=None if time in ("UNLIMITED", "INFINITE", "NONE") else seconds("MaxTime", time),
                up=said.get("State", "UP") == "UP",
                default=said.get("Default") == "YES",
            )
        )
    return found


def read_nodes(answer: str) -> list[Node]:
    """The kinds of nodes that ``sinfo --format '%c|%G'`` lists, such as ``64+|gpu:a100:4(S:0-1),shard:8``."""
    found = []
    for line in answer.splitlines():
        cpus, _, resources = line.partition("|")
        gpus: dict[str, int] = {}
        for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,()]+):)?(\d+)", resources):
            gpus[kind] = gpus.get(kind, 0) + int(count)
        found.append(Node(int(cpus.rstrip("+") or 0), gpus))
    return found


def submit(script: str, *options: str) -> str:
    """Hand a script to sbatch.

    Args:
        script: the whole text.
        options: of sbatch, beside those in the script.

    Returns:
        The job's number.
    """
    answer = ask("sbatch", "--parsable", *options, given=script, environment=_without_contradictions(script))
    return answer.strip().partition(";")[0]


def cancel(number: str) -> None:
    """Cancel a job."""
    ask("scancel", number)


def _without_contradictions(script: str) -> dict[str, str]:
    """The environment without the variables that sbatch would prefer to the lines of the script."""
    lines = [line.removeprefix(HEADER) for line in script.splitlines() if line.startswith(HEADER)]
    said = {*_SAID, *(name for line in lines for name in named(line))}
    if "--mem" in said:
        said |= {"--mem-per-cpu", "--mem-per-gpu"}
    if "gpu" in os.environ.get("SBATCH_GRES", ""):
        said.add("--gres")
    removed = variables_of(said)
    return {name: value for name, value in os.environ.items() if name not in removed}


def ask(*command: str, given: str = "", environment: dict[str, str] | None = None) -> str:
    """What a command of SLURM prints.

    Raises:
        SlurmError: it fails, or takes longer than a minute.
    """
    called = " ".join(command[:3])
    try:
        done = subprocess.run(
            command, input=given, env=environment, text=True, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{called}: no answer within {_LIMIT_S:g} s; is SLURM's controller up?") from None
    except OSError as error:
        raise SlurmError(f"{called}: {error.strerror or error}") from None
    if done.returncode:
        said = "; ".join(filter(None, map(str.strip, done.stderr.splitlines()))) or f"exit status {done.returncode}"
        raise SlurmError(f"{called}: {said}")
    return done.stdout
