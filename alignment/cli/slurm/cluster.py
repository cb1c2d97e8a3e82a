"""Communication with SLURM: list partitions, check whether a job fits one, submit and cancel jobs."""

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

_LIMIT_S = 60.0  # timeout of a SLURM command
_PARTITION = "SBATCH_PARTITION"
# Options that a request determines even if its header has no line for them.
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
    """SLURM is not available, does not respond, or rejects a job."""


class Node(NamedTuple):
    """One kind of node: its number of cores, and its GPUs by type."""

    cpus: int
    gpus: dict[str, int]

    def has(self, kind: str) -> int:
        """Return the number of GPUs of this type, or of all types if it is ``""``."""
        return sum(count for name, count in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition: maximum number of nodes and maximum time in seconds (None: unlimited) of a job."""

    name: str
    nodes: int
    time: int | None
    up: bool
    default: bool


def check_cluster(job: Request) -> None:
    """Check a job against its partition, or the default partition.

    Raises:
        OptionError: the job requests more than the partition has.
        SlurmError: SLURM is not available or does not respond.
    """
    if shutil.which("sbatch") is None:
        raise SlurmError(
            "sbatch is not on PATH; submit from a login node of the cluster, or show the script with --print"
        )
    known = {one.name: one for one in read_partitions(ask("scontrol", "show", "partition", "--oneliner"))}
    given, option = job.partition, "--partition"
    if not given:
        given, option = os.environ.get(_PARTITION, ""), _PARTITION
    names = given.split(",") if given else [one.name for one in known.values() if one.default]
    if not names:
        raise OptionError(f"the cluster has no default partition; set --partition to one of {', '.join(known)}")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OptionError(f"{option}={name!r}: unknown partition; set one of {', '.join(known)}{hint}")
        _check_partition(job, known[name])
        _check_nodes(job, name, read_nodes(ask("sinfo", "--noheader", "--partition", name, "--format", "%c|%G")))


def _check_partition(job: Request, partition: Partition) -> None:
    where = f"the partition {partition.name}"
    if not partition.up:
        raise OptionError(f"--partition={partition.name!r}: the partition is not up; choose another one")
    if job.nodes > partition.nodes:
        raise OptionError(
            f"--nodes={job.nodes}: {where} allows at most {partition.nodes} per job; set --nodes {partition.nodes}"
        )
    if partition.time is not None and job.time > partition.time:
        longest = time_text(partition.time)
        raise OptionError(
            f"--time={time_text(job.time)}: {where} allows at most {longest}; set --time {longest} (the job requeues "
            "itself until the run is complete)"
        )


def _check_nodes(job: Request, partition: str, nodes: list[Node]) -> None:
    where = f"the nodes of partition {partition}"
    most = max((node.has(job.gpus.kind) for node in nodes), default=0)
    if job.gpus.number > most:
        kinds = sorted({name for node in nodes for name in node.gpus if name})
        typed = f" of type {job.gpus.kind}" if job.gpus.kind else ""
        others = f" (available types: {', '.join(kinds)})" if typed and kinds else ""
        raise OptionError(
            f"--gpus={job.gpus}: {where} have at most {most}{typed}{others}; set --gpus to the GPUs per node"
        )
    cores = max((node.cpus for node in nodes if node.has(job.gpus.kind) >= job.gpus.number), default=0)
    if job.cpus * job.tasks > cores:
        raise OptionError(
            f"--cpus-per-task={job.cpus}: the {job.tasks} ranks of a node need {job.cpus * job.tasks} cores, but "
            f"{where} have {cores}; set --cpus-per-task {max(1, cores // job.tasks)}"
        )


def read_partitions(answer: str) -> list[Partition]:
    """Parse the output of ``scontrol show partition --oneliner``."""
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
    """Parse the output of ``sinfo --format '%c|%G'``, such as ``64+|gpu:a100:4(S:0-1),shard:8``."""
    found = []
    for line in answer.splitlines():
        cpus, _, resources = line.partition("|")
        gpus: dict[str, int] = {}
        for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,()]+):)?(\d+)", resources):
            gpus[kind] = gpus.get(kind, 0) + int(count)
        found.append(Node(int(cpus.rstrip("+") or 0), gpus))
    return found


def submit(script: str, *options: str) -> str:
    """Submit a script with sbatch.

    Args:
        script: the text of the script.
        options: sbatch options in addition to those in the script.

    Returns:
        The job id.
    """
    answer = ask("sbatch", "--parsable", *options, given=script, environment=_without_contradictions(script))
    return answer.strip().partition(";")[0]


def cancel(number: str) -> None:
    """Cancel a job."""
    ask("scancel", number)


def _without_contradictions(script: str) -> dict[str, str]:
    """Return the environment without the variables with which sbatch would override the lines of the script."""
    lines = [line.removeprefix(HEADER) for line in script.splitlines() if line.startswith(HEADER)]
    said = {*_SAID, *(name for line in lines for name in named(line))}
    if "--mem" in said:
        said |= {"--mem-per-cpu", "--mem-per-gpu"}
    if "gpu" in os.environ.get("SBATCH_GRES", ""):
        said.add("--gres")
    removed = variables_of(said)
    return {name: value for name, value in os.environ.items() if name not in removed}


def ask(*command: str, given: str = "", environment: dict[str, str] | None = None) -> str:
    """Run a SLURM command and return its output.

    Raises:
        SlurmError: the command fails or takes longer than a minute.
    """
    called = " ".join(command[:3])
    try:
        done = subprocess.run(
            command, input=given, env=environment, text=True, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{called}: no response within {_LIMIT_S:g} s; check that SLURM's controller is up") from None
    except OSError as error:
        raise SlurmError(f"{called}: {error.strerror or error}") from None
    if done.returncode:
        said = "; ".join(filter(None, map(str.strip, done.stderr.splitlines()))) or f"exit status {done.returncode}"
        raise SlurmError(f"{called}: {said}")
    return done.stdout
