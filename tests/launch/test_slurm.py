"""A real SLURM on this machine: requeues, lost nodes, preemption, arrays and dependencies, with the generated script.

A run trains on two nodes, while stand-in jobs (``slurm_worker.py``) wait for SLURM on others.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, ROOT

from alignment.run.status_file import RunStatus, read_status
from tools.chaos.judge import look, step_of, without_times
from tools.chaos.world import World
from tools.ranks.client import environment
from tools.ranks.process import wait_until
from tools.slurm.cluster import Cluster, why_not

MISSING = why_not()
pytestmark = [
    pytest.mark.slow,  # `make slurm`
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
    pytest.mark.usefixtures("launch"),  # to run it with the tests that start processes
]
STEPS, SAVE_STEPS = 45, 5
# The script sets the first one; evaluations would only take time.
LEFT_OUT = (
    *("--resume_from_checkpoint", "--load_best_model_at_end", "--eval_strategy", "--eval_steps"),
    *("--dataset_test_split", "--max_eval_samples"),
)
SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
DOCS = ROOT / "docs" / "guides" / "slurm.md"


@dataclass
class Job:
    """A job submitted by the command, and its output folder."""

    cluster: Cluster
    number: str
    folder: Path

    def state(self) -> dict[str, str]:
        """Return SLURM's information about the job."""
        shown = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number).stdout
        return dict(part.partition("=")[::2] for part in shown.split())

    def ended(self, seconds: float) -> str:
        """Wait for the end of the job, and return its state."""
        going = ("PENDING", "RUNNING", "COMPLETING")
        wait_until(lambda: self.state().get("JobState") not in going, seconds, self.report)
        return self.state()["JobState"]

    def attempts(self, task: str = "") -> list[dict[str, Any]]:
        """Return the attempts of the stand-in."""
        path = self.folder / task / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def status(self) -> RunStatus:
        return read_status(self.folder) or RunStatus()

    def report(self) -> str:
        logs = sorted(self.folder.parent.glob(f"{self.folder.name}*.out"))
        texts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs]
        return "\n".join([str(self.state()), str(self.status()), *texts])


@dataclass
class Here:
    """The cluster, the model and data, and the way to submit jobs."""

    cluster: Cluster
    folder: Path
    world: World

    def arguments(self, output_dir: Path) -> list[str]:
        """Return the arguments of a short run that saves often."""
        given = self.world.arguments("kto", output_dir)
        options = dict(zip(given[1::2], given[2::2])) | {"--max_steps": str(STEPS), "--save_steps": str(SAVE_STEPS)}
        for name in LEFT_OUT:
            del options[name]
        return [given[0], *(part for pair in options.items() for part in pair)]

    def run(self, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        env = environment(**self.cluster.variables, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
        given: dict[str, Any] = {"env": env, "cwd": self.folder, "text": True, "capture_output": True}
        return subprocess.run(command, timeout=120, check=False, **given)

    def submit(self, name: str, arguments: list[str], **variables: str) -> Job:
        """Run ``submit`` and parse the job ID in its output."""
        done = self.run([*SUBMIT, *arguments], **variables)
        matched = re.match(r"submitted job (\d+): ", done.stdout)
        assert matched and not done.stderr, done.stdout + done.stderr
        return Job(self.cluster, matched[1], self.folder / name)

    def stand_in(self, name: str, todo: str, *options: str) -> Job:
        """Submit a stand-in job on the node without GPUs."""
        arguments = self.arguments(self.folder / name)
        worker = self.folder / "worker"
        if not worker.exists():
            worker.write_text(f'#!/bin/sh\nexec {sys.executable} {DRIVERS / "slurm_worker.py"} "$@"\n')
            worker.chmod(0o755)
        where = ["--gpus", "0", "--cpus-per-task", "1", *(() if "--partition" in options else ("--partition", "cpu"))]
        return self.submit(name, [*arguments, *where, *options], ALIGNMENT_PYTHON=str(worker), WORKER=todo)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """The cluster. Its folder has a short name, because socket paths are limited to 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster, place = Cluster(folder), tmp_path_factory.mktemp("slurm jobs")  # a space, to check quoting
    try:
        cluster.start()
        yield Here(cluster, place, World.made(place / "world"))
    finally:
        cluster.stop()
        for log in folder.glob("*.log"):
            shutil.copy(log, place)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def waiting(here: Here) -> dict[str, Job]:
    """All jobs that mostly wait for SLURM, submitted at the same time."""
    jobs = {
        "cancelled": here.stand_in("cancelled", "wait"),
        "near its limit": here.stand_in("limit", "wait", "--time", "2", "--signal", "USR1@59"),
        "cancelled while it saves": here.stand_in("saving", "save"),
        "array": here.stand_in("array", "requeue", "--seeds", "3-4"),
        "prepared": here.stand_in("prepared", "", "--prepare", "--prepare-partition", "cpu", "--prepare-time", "10"),
        "preempted": here.stand_in("preempted", "wait", "--partition", "low", "--", "--exclusive"),
    }

    def running(name: str) -> str:
        wait_until(lambda: jobs[name].status().state == "running", 30, jobs[name].report)
        return jobs[name].number

    running("preempted")
    here.cluster.run("sbatch", "--partition", "high", "--exclusive", "--output", "/dev/null", "--wrap", "sleep 1")
    assert here.cluster.run("scancel", running("cancelled")).returncode == 0
    here.cluster.run("scancel", "--signal=USR1", running("cancelled while it saves"))
    time.sleep(1)
    assert here.cluster.run("scancel", jobs["cancelled while it saves"].number).returncode == 0
    return jobs


# A run on two nodes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(here: Here, waiting: dict[str, Job]) -> Path:
    """Return the output folder of an undisturbed run, started with the documented command on fewer nodes."""
    text = DOCS.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun --nodes 4 --ntasks-per-node 8 ")]
    command = shlex.split(line.partition(" kto --dataset_name ")[0])
    assert command[-2:] == ["python", "launch/train.py"]
    small = {"--nodes": "2", "--ntasks-per-node": "1", "--gpus-per-node": "1", "--cpus-per-task": "1"}
    for option, value in small.items():
        command[command.index(option) + 1] = value
    arguments = [*here.arguments(here.folder / "undisturbed"), "--resume_from_checkpoint", "latest"]
    done = here.run([*command[:-2], sys.executable, str(ROOT / "launch" / "train.py"), *arguments])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return here.folder / "undisturbed"


def test_a_run_on_two_nodes_with_every_disturbance(here: Here, undisturbed: Path) -> None:
    """Preemption, requeue, loss of the second node, loss of the batch script's node: the weights are the same."""
    arguments = here.arguments(here.folder / "out")
    job = here.submit("out", [*arguments, "--nodes", "2", "--cpus-per-task", "1", "--time", "10"])
    checkpoints, ends = [0], []

    def trained(attempt: int) -> None:
        """Wait until this attempt has written a checkpoint."""

        def further() -> bool:
            status = job.status()
            assert status.restarts < attempt or status.state in ("starting", "running"), job.report()
            written = max(map(step_of, job.folder.glob("checkpoint-*")), default=0)
            return status.restarts == attempt - 1 and written > checkpoints[-1]

        wait_until(further, 180, job.report)

    def requeued() -> None:
        """Wait until the job has left its nodes and waits for a restart."""
        wanted = {"Restarts": str(len(ends) + 1), "JobState": "PENDING"}
        wait_until(lambda: job.state().items() >= wanted.items(), 120, job.report)
        status = job.status()
        ends.append((status.state, status.signal))
        found = look(job.folder)
        assert not found.problems, found.problems
        checkpoints.append(max(found.steps))

    trained(1)
    here.cluster.run("scancel", "--signal=USR1", job.number)
    requeued()
    trained(2)
    here.cluster.run("scontrol", "requeue", job.number)
    requeued()
    trained(3)
    here.cluster.lose("n2")  # SLURM detects it by itself
    requeued()
    trained(4)
    batch_host = job.state()["BatchHost"]
    here.cluster.lose(batch_host)
    down = (f"NodeName={batch_host}", "State=DOWN", "Reason=lost")  # as a health check would report it
    here.cluster.run("scontrol", "update", *down)
    requeued()
    assert job.ended(120) == "COMPLETED", job.report()
    assert ends[:2] == [("preempted", "SIGUSR1"), ("preempted", "SIGTERM")], job.report()
    assert {state for state, _ in ends[2:]} <= {"failed", "running"}, ends
    status = job.status()
    assert (status.state, status.step, status.attempt, status.restarts) == ("finished", STEPS, 5, 4)
    assert differences(job.folder, undisturbed) == [], job.report()
    log = (here.folder / f"out-{job.number}.out").read_text()
    assert re.findall(r"attempt (\d) on n\[[\d,-]+\]: train", log) == list("12345")
    # SLURM made the other requeues.
    assert log.count("requeued; the next attempt resumes from the latest checkpoint") == 1


def differences(folder: Path, reference: Path) -> list[str]:
    """Return files with different content, and the log if its records without times, starts and stops differ."""
    names = sorted(str(path.relative_to(reference)) for path in reference.rglob("*.safetensors"))
    assert len(names) > 3
    found = [name for name in names if (folder / name).read_bytes() != (reference / name).read_bytes()]
    own, expected = (
        [without_times(record) for line in (each / "log.jsonl").open() if "event" not in (record := json.loads(line))]
        for each in (folder, reference)
    )
    return found + ["log.jsonl"] * (own != expected)


# Jobs that mostly wait ----------------------------------------------------------------------------------------------


def test_slurms_signal_before_the_time_limit(waiting: dict[str, Job]) -> None:
    job = waiting["near its limit"]
    wait_until(lambda: len(job.attempts()) > 1, 120, job.report)
    first, second, *_ = job.attempts()
    assert (first["restarts"], second["restarts"], first["notice"]) == (0, 1, "59")
    assert 5 < second["time"] - first["time"] < 80, job.attempts()
    job.cluster.run("scancel", job.number)


@pytest.mark.parametrize(
    ("name", "signal", "said"),
    [
        ("cancelled", "SIGTERM", "received SIGTERM; waiting for the run"),
        ("cancelled while it saves", "SIGUSR1", "not requeued: the job was cancelled or terminated"),
    ],
)
def test_a_cancelled_job_stays_cancelled(waiting: dict[str, Job], name: str, signal: str, said: str) -> None:
    """Also one that was saving for a requeue."""
    job = waiting[name]
    assert job.ended(30) == "CANCELLED"
    status = job.status()
    assert (status.state, status.signal, len(job.attempts())) == ("preempted", signal, 1)
    assert said in job.report() and job.state()["Restarts"] == "0"


def test_a_preempted_job_is_requeued_at_the_end_of_its_grace_time(waiting: dict[str, Job]) -> None:
    job = waiting["preempted"]
    wait_until(lambda: len(job.attempts()) == 2, 90, job.report)
    assert "status.json: preempted SIGTERM" in job.report() and job.state()["Restarts"] == "1"


def test_each_task_of_an_array_is_requeued_separately(waiting: dict[str, Job]) -> None:
    job = waiting["array"]
    for seed in (3, 4):
        wait_until(lambda seed=seed: len(job.attempts(f"seed-{seed}")) == 2, 60, job.report)
        first, second = job.attempts(f"seed-{seed}")
        assert (first["restarts"], second["restarts"]) == (0, 1)
        assert first["arguments"][first["arguments"].index("--seed") + 1] == str(seed)
        assert (job.folder.parent / f"array-{job.number}_{seed}.out").exists()


def test_training_waits_for_its_preparation_job(here: Here, waiting: dict[str, Job]) -> None:
    job = waiting["prepared"]
    assert job.ended(60) == "COMPLETED"
    (attempt,) = job.attempts()
    (log,) = job.folder.parent.glob("prepared-prepare-*.out")
    assert f"{here.world.folder}/kto.jsonl: 24 of 24 rows kept" in log.read_text()
    assert log.stat().st_mtime <= attempt["time"], job.report()


def test_the_documented_sbatch_commands(here: Here) -> None:
    """SLURM reports when the job would start, without starting it."""
    lines = [line for line in DOCS.read_text().replace("\\\n", " ").splitlines() if line.startswith("sbatch ")]
    assert len(lines) == 3
    for line in lines:
        command = re.sub(r"(--[a-z-]+-per-node) 8", r"\1 1", line.replace("--nodes 4", "--nodes 2")).split()
        done = here.cluster.run(command[0], "--test-only", *command[1:])
        assert done.returncode == 0 and re.match(r"sbatch: Job \d+ to start at ", done.stderr), done.stderr
