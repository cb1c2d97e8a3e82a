"""``launch/slurm/train.sbatch`` with a fake ``srun`` and ``scontrol``: what it starts, and when it requeues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from tools.ranks.process import wait_until

SCRIPT = ROOT / "launch" / "slurm" / "train.sbatch"
# They write down how they were called. srun does what FAKE says in place of the run; squeue prints the job's state,
# and once that it is being preempted.
FAKES = {
    "srun": 'printf "%s\\n" "$@" >"$CALLS/srun"; env >"$CALLS/environment"; eval "$FAKE"',
    "scontrol": '[[ $1 == show ]] && echo n1 && echo n2 && exit; echo "$@" >>"$CALLS/scontrol"; kill -TERM $PPID; '
    'exit "${REQUEUED:-0}"',
    "squeue": 'echo "$@" >>"$CALLS/squeue"; [[ $* == *PreemptTime* ]] || { printf "%-30s%-60s\\n" '
    '$(cat "$CALLS/state" 2>/dev/null || echo RUNNING None); exit; }; '
    'rm "$CALLS/grace" 2>/dev/null && echo 2026-11-22T19:28:27 || echo N/A',
}
PREEMPTED = {"state": "preempted", "signal": "SIGUSR1", "job": "12", "restarts": 0, "stalled": 0}
# What a run does that saves after a signal; it waits for the file `go`.
SAVES = "touch $CALLS/ready; while [[ ! -e $CALLS/go ]]; do sleep 0.02; done; cp left.json out/status.json; exit 85"


@dataclass
class Ran:
    """The result of the script: exit status, output, and its calls of srun and scontrol."""

    code: int
    out: str
    srun: list[str]
    scontrol: str
    environment: dict[str, str]

    @property
    def started(self) -> str:
        """The arguments of the command that srun starts."""
        return " ".join(self.srun[self.srun.index("alignment") + 1 :])

    def failed(self, message: str) -> bool:
        """Whether the script failed with this message before starting anything."""
        return (self.code, self.srun) == (1, []) and f"error: {message}" in self.out


class Script:
    """The script in a separate folder, with a status file of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for made in ("bin", "calls", "out"):
            (folder / made).mkdir()
        for name, text in FAKES.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        shutil.copy(SCRIPT, folder / "slurm_script")

    def start(self, *arguments: str, fake: str = "", **variables: str) -> subprocess.Popen[str]:
        """As slurmd starts it: job 12 on two nodes with two tasks each."""
        env = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "CALLS": str(self.calls), "FAKE": fake}
        env |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        env |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "3", **variables}
        for name in ("srun", "environment", "scontrol", "go", "ready"):  # of the run before
            (self.calls / name).unlink(missing_ok=True)
        command = ["bash", str(self.folder / "slurm_script"), *(arguments or ("kto", "--output_dir", "out"))]
        return subprocess.Popen(
            command, env=env, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def ran(self, process: subprocess.Popen[str]) -> Ran:
        """Wait for its end."""
        out, _ = process.communicate(timeout=30)
        read = {path.name: path.read_text() for path in self.calls.iterdir()}
        environment = dict(line.partition("=")[::2] for line in read.get("environment", "").splitlines())
        return Ran(process.returncode, out, read.get("srun", "").splitlines(), read.get("scontrol", ""), environment)

    def run(self, *arguments: str, status: dict[str, object] | None = None, code: int = 0, **variables: str) -> Ran:
        """Run it with a run that leaves this ``status.json`` and ends with this exit status."""
        fake = f"exit {code}"
        if status is not None:
            (self.folder / "left.json").write_text(json.dumps(status, indent=2) + "\n")
            fake = f"cp {self.folder}/left.json {self.folder}/out/status.json; {fake}"
        return self.ran(self.start(*arguments, fake=fake, **variables))

    def signaled(self, fake: str, *signals: signal.Signals) -> Ran:
        """Run it and send it these signals as soon as the run is ready, which then continues."""
        process = self.start(fake=fake)
        wait_until((self.calls / "ready").exists, 20)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        assert process.poll() is None
        (self.calls / "go").touch()
        return self.ran(process)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


# What it starts -----------------------------------------------------------------------------------------------------


def test_srun_receives_what_it_does_not_inherit_from_sbatch(script: Script) -> None:
    ran = script.run("kto", "--output_dir", "out", "--beta", "0.2", RANK="0", MASTER_ADDR="left.over")
    expected = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=3 --gpu-bind=none --kill-on-bad-exit=1"
    assert ran.code == 0 and set(f"{expected} --export=ALL python -m alignment".split()) < set(ran.srun)
    assert ran.started == "train kto --beta 0.2 --output_dir out --resume_from_checkpoint latest"
    names = ("MASTER_ADDR", "ALIGNMENT_STOP_NOTICE", "OMP_NUM_THREADS", "TRITON_CACHE_DIR")
    cache = f"/tmp/alignment-{os.getuid()}/triton"
    assert [ran.environment[name] for name in names] == ["n1", "120", "3", cache]
    assert "RANK" not in ran.environment


def test_variables_set_python_command_cache_and_notice(script: Script) -> None:
    variables = {"PYTHON": "/venv/bin/python", "COMMAND": "prepare", "NODE_CACHE": "/disk/c", "STOP_NOTICE": "300"}
    variables["SRUN"] = "--label --cpu-bind=cores"
    ran = script.run(**{f"ALIGNMENT_{name}": value for name, value in variables.items()})
    assert ran.started.startswith("prepare kto") and "--label --cpu-bind=cores /venv/bin/python" in " ".join(ran.srun)
    assert ran.environment["TORCH_EXTENSIONS_DIR"] == "/disk/c/torch_extensions"
    assert ran.environment["ALIGNMENT_STOP_NOTICE"] == "300"


def test_setup_runs_first_and_its_failure_ends_the_job(script: Script) -> None:
    modules = 'module() { loaded+=("$1"); FOUND="a module"; }; module load; NCCL_DEBUG=INFO; MASTER_ADDR=n1-ib'
    ran = script.run(ALIGNMENT_SETUP=modules)
    names = ("FOUND", "NCCL_DEBUG", "MASTER_ADDR")
    assert [ran.environment.get(name) for name in names] == ["a module", "INFO", "n1-ib"]
    assert "tasks" not in ran.environment, "the script's own are not exported"
    assert script.run(ALIGNMENT_SETUP="module load nothing").failed("ALIGNMENT_SETUP failed: module load nothing")


@pytest.mark.parametrize(
    ("container", "mounts", "before"),
    [
        ("apptainer:/a b.sif", "/x", ["apptainer", "exec", "--nv", "--bind", "CWD,/x", "--pwd", "CWD", "/a b.sif"]),
        ("pyxis:a.sqsh", "/data:/d,/home", ["--container-image=a.sqsh", "--container-workdir=CWD",
                                            "--container-mounts=CWD:CWD,/data:/d,/home:/home"]),
    ],
)  # fmt: skip
def test_containers(script: Script, container: str, mounts: str, before: list[str]) -> None:
    ran = script.run(ALIGNMENT_CONTAINER=container, ALIGNMENT_MOUNTS=mounts)
    python = ran.srun.index("python")
    assert ran.srun[python - len(before) : python] == [part.replace("CWD", str(script.folder)) for part in before]


def test_invalid_settings(script: Script) -> None:
    assert script.run(ALIGNMENT_CONTAINER="image.sif").failed("ALIGNMENT_CONTAINER=image.sif: ")
    assert script.run(ALIGNMENT_MAX_STALLED="08").failed("ALIGNMENT_MAX_STALLED=08: ")


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("  output_dir: 'runs/a b'  # where", "runs/a b"), ("  output_dir:   runs/kto # x", "runs/kto"),
        ('output_dir: "/a b/#x"', "/a b/#x"), ("output_dir: ../größe a\r", "../größe a"),
    ],
)  # fmt: skip
def test_the_output_folder_of_a_recipe(script: Script, line: str, folder: str) -> None:
    (script.folder / "own.yaml").write_text(f"method: kto\nsaving:\n{line}\n  # output_dir: other\n")
    assert yaml.safe_load(line)["output_dir"] == folder
    assert script.run("own.yaml").started.startswith(f"train own.yaml --output_dir {folder} --resume")
    assert script.run("own.yaml", "--output_dir=given").started.startswith("train own.yaml --output_dir given ")


@pytest.mark.parametrize(
    "line",
    [
        "{saving: {output_dir: runs/kto}}", "output_dir: &a runs", "output_dir: 'it''s'", "output_dir: |",
        "output_dir: runs\n    /kto", "output_dir: a\n  output_dir: b",
    ],
)  # fmt: skip
def test_an_output_folder_in_yaml_that_the_script_does_not_support(script: Script, line: str) -> None:
    """Only Python could parse these lines; a partial match would be another folder."""
    (script.folder / "own.yaml").write_text(f"{'' if line[0] == '{' else 'saving:'}\n  {line}\n")
    assert script.run("own.yaml").failed("own.yaml line ")


@pytest.mark.parametrize("line", ["output_dir:", "merged_output_dir: x  # output_dir: x"])
def test_no_folder_is_an_error(script: Script, line: str) -> None:
    (script.folder / "own.yaml").write_text(f"method: kto\n#output_dir: a\n{line}\n")
    assert script.run("own.yaml", "--output_dir", "--beta", "1").failed("output_dir is set neither in the arguments")


def test_the_home_in_a_folder(script: Script) -> None:
    """The shell does not expand `--output_dir=~/x`; the run would write where the script does not look."""
    (script.folder / "own.yaml").write_text("output_dir: ~/out\n")
    for given in ([], ["--output_dir=~/out"]):
        ran = script.run("own.yaml", *given, status=PREEMPTED, code=85, HOME=str(script.folder))
        assert f"--output_dir {script.folder}/out " in ran.started and ran.scontrol == "requeue 12\n"


def test_an_array_task_has_its_own_seed_folder_and_job_id(script: Script) -> None:
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "11"}
    assert script.run("kto", "--output_dir", "out", "--seed=4", **array).failed("a job array sets --seed itself")
    (script.folder / "out" / "seed-3").mkdir()
    fake = f"echo '{json.dumps(PREEMPTED, indent=2)}' >out/seed-3/status.json; exit 85"
    ran = script.ran(script.start(fake=fake, **array))
    assert ran.started == "train kto --seed 3 --output_dir out/seed-3 --resume_from_checkpoint latest"
    assert (ran.code, ran.scontrol) == (0, "requeue 11_3\n")
    assert (script.calls / "squeue").read_text().count("--job 11_3 ") == 2, "of this task alone"


def test_the_checkpoint_to_resume_from(script: Script) -> None:
    """An explicit one applies to the first attempt; without a value, the option means the latest, as for `train`."""
    (script.folder / "own.yaml").write_text("output_dir: out\nresume_from_checkpoint: c/9\n")
    for given in (["--resume_from_checkpoint", "c/9"], ["--resume_from_checkpoint=c/9"], []):
        assert script.run("own.yaml", *given).started.endswith(" c/9")
        assert script.run("own.yaml", *given, SLURM_RESTART_COUNT="1").started.endswith(" latest")
    for order in ("--resume_from_checkpoint --output_dir out", "--output_dir out --resume_from_checkpoint"):
        ran = script.run("kto", *order.split(), "--beta", "0.2")
        assert ran.started.endswith("out --resume_from_checkpoint latest")


# When it requeues its job -------------------------------------------------------------------------------------------


def test_a_run_out_of_time_is_requeued(script: Script) -> None:
    ran = script.run(status=PREEMPTED | {"restarts": 4}, code=85, SLURM_RESTART_COUNT="4")
    assert (ran.code, ran.scontrol) == (0, "requeue 12\n") and "requeued; the next attempt" in ran.out
    ran = script.run(status=PREEMPTED, code=85, REQUEUED="1")
    assert ran.code == 1 and "error: could not requeue the job; submit it again" in ran.out


@pytest.mark.parametrize(
    "change",
    [
        {"signal": "SIGTERM"}, {"state": "running"}, {"state": "stopped", "signal": "STOP"}, {"job": "112"},
        {"restarts": 1}, {"state": "failed", "error": '"state": "preempted",'},
    ],
    ids=str,
)  # fmt: skip
def test_other_runs_are_not_requeued(script: Script, change: dict[str, object]) -> None:
    ran = script.run(status=PREEMPTED | change, code=85)
    assert (ran.code, ran.scontrol) == (85, "")


def test_status_of_earlier_attempts_is_ignored(script: Script) -> None:
    assert script.run(code=7).scontrol == ""
    assert script.run(status=PREEMPTED, code=1, SLURM_RESTART_COUNT="1").scontrol == ""


@pytest.mark.parametrize(
    ("state", "term", "requeued"),
    [
        ("COMPLETING None", False, False), ("COMPLETING PartitionTimeLimit", False, False),
        ("RUNNING None", True, False), ("COMPLETING TimeLimit", False, True), ("COMPLETING TimeLimit", True, True),
    ],
)  # fmt: skip
def test_a_job_that_was_cancelled_while_its_run_saved_is_not_requeued(
    script: Script, state: str, term: bool, requeued: bool
) -> None:
    """TERM comes from a user, or from SLURM at the time limit, if saving takes longer than the notice."""
    (script.calls / "state").write_text(state)
    (script.folder / "left.json").write_text(json.dumps(PREEMPTED, indent=2))
    ran = script.signaled(SAVES, *[signal.SIGTERM] * term)
    assert (ran.code, ran.scontrol) == ((0, "requeue 12\n") if requeued else (85, "")), ran.out
    assert ("not requeued: the job was cancelled or terminated" in ran.out) is not requeued


def test_a_file_stop_ends_the_job(script: Script) -> None:
    """Also if it is created while the run saves near its time limit, or while the job waits to be restarted."""
    stop = script.folder / "out" / "STOP"
    stop.touch()
    ran = script.run(status=PREEMPTED, code=85)
    assert (ran.code, ran.scontrol) == (85, "") and "not requeued: out/STOP exists; to resume, remove it" in ran.out
    assert script.run(SLURM_RESTART_COUNT="1").failed("out/STOP exists; to resume, remove it")
    assert script.run(SLURM_RESTART_COUNT="1", SLURM_JOB_ID="13").srun, "it was meant for the job before"
    stop.unlink()
    assert script.run(SLURM_RESTART_COUNT="1").srun


def test_consecutive_attempts_without_a_new_checkpoint_are_limited(script: Script) -> None:
    assert script.run(status=PREEMPTED | {"stalled": 4}, code=85).scontrol == "requeue 12\n"
    for stalled, limit in ((5, {}), (17, {}), (2, {"ALIGNMENT_MAX_STALLED": "2"})):
        ran = script.run(status=PREEMPTED | {"stalled": stalled}, code=85, **limit)
        assert (ran.code, ran.scontrol) == (1, "")
        assert f"error: not requeued: {stalled} consecutive attempts ended without a new checkpoint" in ran.out


def test_a_job_that_slurm_requeues_is_limited_as_well(script: Script) -> None:
    """Its nodes fail repeatedly, so no attempt reaches the end of the script."""
    script.run(status=PREEMPTED | {"state": "running", "signal": None, "stalled": 5}, code=1)
    assert script.run(SLURM_RESTART_COUNT="5").failed("5 consecutive attempts ended without a new checkpoint")
    assert script.run().srun  # submitted again by a person
    assert script.run(SLURM_RESTART_COUNT="1", SLURM_JOB_ID="13").srun


@pytest.mark.ci
def test_a_preempted_job_with_a_grace_period_waits_for_its_end(script: Script) -> None:
    """SLURM requeues it at that time; a job that ends before counts as failed."""
    (script.calls / "grace").touch()
    ran = script.run(status=PREEMPTED | {"signal": "SIGTERM"}, code=85)
    assert (ran.code, ran.scontrol) == (85, "")
    assert (script.calls / "squeue").read_text().count("--job 12") == 2


def test_term_is_not_passed_on_and_usr1_is(script: Script) -> None:
    """srun would kill its tasks on TERM; SLURM has sent it to the tasks already, and they save."""
    ran = script.signaled(f"trap 'echo heard USR1' USR1; {SAVES}", *3 * [signal.SIGTERM], signal.SIGUSR1)
    assert ran.code == 85 and ran.out.count("heard USR1") == 1 and "received SIGTERM; waiting for the run" in ran.out
