"""``launch/slurm/train.sbatch`` with a pretended ``srun`` and ``scontrol``: what it starts, and when it requeues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = ROOT / "launch" / "slurm" / "train.sbatch"
# Both write down how they were called; srun then does what FAKE says, in the place of the run.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$CALLS/srun"
env >"$CALLS/environment"
eval "$FAKE"
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && echo n1 && echo n2 && exit
echo "$@" >>"$CALLS/scontrol"
exit "${REQUEUED:-0}"
"""
# Preempted, as long as the file is there; it takes itself away.
SQUEUE = """#!/bin/bash
echo "$@" >>"$CALLS/squeue"
rm "$CALLS/grace" 2>/dev/null && echo 2026-11-22T19:28:27 || echo N/A
"""
PYXIS = ["--container-workdir=CWD"]
PREEMPTED = {"state": "preempted", "signal": "SIGUSR1", "job": "12", "restarts": 0, "stalled": 0}


@dataclass
class Ran:
    """What became of the script: its exit status and output, what it had srun start, and its calls of scontrol."""

    code: int
    out: str
    srun: list[str]
    scontrol: str
    environment: dict[str, str]

    @property
    def started(self) -> list[str]:
        """The arguments of the command that srun starts, from the command's name on."""
        return self.srun[self.srun.index("alignment") + 1 :]

    def value(self, option: str) -> list[str]:
        """The values of an option of srun."""
        return [part.partition("=")[2] for part in self.srun if part.partition("=")[0] == option]


class Script:
    """The script, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "bin").mkdir()
        self.calls.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        shutil.copy(SCRIPT, folder / "slurm_script")

    def start(self, *arguments: str, fake: str = "", **variables: str) -> subprocess.Popen[str]:
        """As slurmd starts it: job 12 on two nodes with two tasks each."""
        env = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "CALLS": str(self.calls),
            "FAKE": fake,
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_CPUS_PER_TASK": "3",
            **variables,
        }
        for name in ("srun", "environment"):  # of the run before
            (self.calls / name).unlink(missing_ok=True)
        command = ["bash", str(self.folder / "slurm_script"), *arguments]
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
            fake = f"mkdir -p {self.folder}/out; cp {self.folder}/left.json {self.folder}/out/status.json; {fake}"
        return self.ran(self.start(*(arguments or ("kto", "--output_dir", "out")), fake=fake, **variables))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_it_is_valid_bash() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True, check=True).stderr == b""
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", SCRIPT], text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


# What it starts -----------------------------------------------------------------------------------------------------


def test_every_rank_is_started_with_what_srun_does_not_take_from_sbatch(script: Script) -> None:
    ran = script.run("kto", "--output_dir", "out", "--beta", "0.2", RANK="0", MASTER_ADDR="left.over")
    assert ran.code == 0
    assert [ran.value(f"--{name}") for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")] == [
        ["2"], ["4"], ["2"], ["3"],
    ]  # fmt: skip
    assert [ran.value(f"--{name}") for name in ("gpu-bind", "kill-on-bad-exit", "export")] == [
        ["none"],
        ["1"],
        ["ALL"],
    ]
    assert ran.srun[ran.srun.index("python") :][:3] == ["python", "-m", "alignment"]
    assert ran.started == [
        "train",
        "kto",
        "--beta",
        "0.2",
        "--output_dir",
        "out",
        "--resume_from_checkpoint",
        "latest",
    ]
    names = ("MASTER_ADDR", "ALIGNMENT_STOP_NOTICE", "OMP_NUM_THREADS", "TRITON_CACHE_DIR")
    cache = f"/tmp/alignment-{os.getuid()}/triton"
    assert [ran.environment[name] for name in names] == ["n1", "120", "3", cache]
    assert "RANK" not in ran.environment


def test_variables_choose_another_python_command_cache_and_notice(script: Script) -> None:
    variables = {"PYTHON": "/venv/bin/python", "COMMAND": "prepare", "NODE_CACHE": "/disk/c", "STOP_NOTICE": "300"}
    ran = script.run(
        **{f"ALIGNMENT_{name}": value for name, value in variables.items()}, ALIGNMENT_SRUN="--label --cpu-bind=cores"
    )
    assert ran.started[:2] == ["prepare", "kto"] and "/venv/bin/python" in ran.srun
    assert ran.srun.index("--label") == ran.srun.index("--cpu-bind=cores") - 1 < ran.srun.index("/venv/bin/python")
    assert ran.environment["TORCH_EXTENSIONS_DIR"] == "/disk/c/torch_extensions"
    assert ran.environment["ALIGNMENT_STOP_NOTICE"] == "300"


def test_setup_runs_first_and_its_failure_ends_the_job(script: Script) -> None:
    ran = script.run(ALIGNMENT_SETUP="export FOUND='a module'; MASTER_ADDR=n1-ib")
    assert (ran.environment["FOUND"], ran.environment["MASTER_ADDR"]) == ("a module", "n1-ib")
    ran = script.run(ALIGNMENT_SETUP="module load nothing")
    assert (ran.code, ran.srun) == (1, []) and "error: ALIGNMENT_SETUP failed: module load nothing" in ran.out


@pytest.mark.parametrize(
    ("container", "mounts", "before"),
    [
        ("apptainer:/a b.sif", "", ["apptainer", "exec", "--nv", "--bind", "CWD", "--pwd", "CWD", "/a b.sif"]),
        ("apptainer:a.sif", "/data", ["apptainer", "exec", "--nv", "--bind", "CWD,/data", "--pwd", "CWD", "a.sif"]),
        ("pyxis:nvcr.io#nvidia/pytorch:25.01-py3", "",
         ["--container-image=nvcr.io#nvidia/pytorch:25.01-py3", *PYXIS, "--container-mounts=CWD:CWD"]),
        ("pyxis:a.sqsh", "/data:/d,/home",
         ["--container-image=a.sqsh", *PYXIS, "--container-mounts=CWD:CWD,/data:/d,/home:/home"]),
    ],
)  # fmt: skip
def test_containers(script: Script, container: str, mounts: str, before: list[str]) -> None:
    given = {"ALIGNMENT_MOUNTS": mounts} if mounts else {}
    ran = script.run(ALIGNMENT_CONTAINER=container, **given)
    expected = [part.replace("CWD", str(script.folder)) for part in before]
    python = ran.srun.index("python")
    assert ran.srun[python - len(expected) : python] == expected


def test_an_unknown_kind_of_container(script: Script) -> None:
    ran = script.run(ALIGNMENT_CONTAINER="image.sif")
    assert (ran.code, ran.srun) == (1, [])
    assert "error: ALIGNMENT_CONTAINER=image.sif: expected apptainer:IMAGE or pyxis:IMAGE" in ran.out


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("output_dir: runs/kto", "runs/kto"), ("  output_dir: 'runs/a b'  # where", "runs/a b"),
        ('output_dir: "runs/kto"', "runs/kto"), ("  output_dir:   runs/kto # x", "runs/kto"),
    ],
)  # fmt: skip
def test_the_folder_that_a_recipe_names(script: Script, line: str, folder: str) -> None:
    (script.folder / "own.yaml").write_text(f"method: kto\nsaving:\n{line}\n  # output_dir: other\n")
    assert script.run("own.yaml").started[:4] == ["train", "own.yaml", "--output_dir", folder]
    assert script.run("own.yaml", "--output_dir=given").started[2:4] == ["--output_dir", "given"]


def test_no_folder_is_an_error(script: Script) -> None:
    for arguments in (["kto"], ["kto", "--output_dir"]):
        ran = script.run(*arguments)
        assert (ran.code, ran.srun) == (1, []) and "error: no output_dir among the arguments" in ran.out


def test_a_task_of_an_array_has_its_own_seed_folder_and_number(script: Script) -> None:
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "11"}
    ran = script.run("kto", "--output_dir", "out", **array)
    assert ran.started == [
        *("train", "kto", "--seed", "3", "--output_dir", "out/seed-3", "--resume_from_checkpoint", "latest")
    ]
    for seed in (["--seed", "4"], ["--seed=4"]):
        ran = script.run("kto", "--output_dir", "out", *seed, **array)
        assert ran.code == 1 and "error: a job array sets --seed: remove it" in ran.out
    (script.folder / "out" / "seed-3").mkdir(parents=True)
    fake = f"echo '{json.dumps(PREEMPTED, indent=2)}' >out/seed-3/status.json; exit 85"
    ran = script.ran(script.start("kto", "--output_dir", "out", fake=fake, **array))
    assert (ran.code, ran.scontrol) == (0, "requeue 11_3\n")


def test_a_named_checkpoint_is_for_the_first_attempt(script: Script) -> None:
    for given in (["--resume_from_checkpoint", "out/checkpoint-9"], ["--resume_from_checkpoint=out/checkpoint-9"]):
        arguments = ["kto", *given, "--output_dir", "out"]
        assert script.run(*arguments).started[-1] == "out/checkpoint-9"
        assert script.run(*arguments, SLURM_RESTART_COUNT="1").started[-1] == "latest"


# When it requeues its job -------------------------------------------------------------------------------------------


def test_a_run_out_of_time_is_requeued(script: Script) -> None:
    ran = script.run(status=PREEMPTED, code=85)
    assert (ran.code, ran.scontrol) == (0, "requeue 12\n") and "requeued, to go on" in ran.out
    ran = script.run(status=PREEMPTED | {"restarts": 4}, code=85, SLURM_RESTART_COUNT="4")
    assert (ran.code, ran.scontrol) == (0, "requeue 12\nrequeue 12\n")


@pytest.mark.parametrize(
    "change",
    [
        {"signal": "SIGTERM"}, {"signal": "SIGHUP"}, {"signal": None}, {"state": "running"}, {"state": "failed"},
        {"state": "stopped", "signal": "SIGINT"}, {"state": "stopped", "signal": "STOP"}, {"state": "finished"},
        {"job": "11"}, {"job": "112"}, {"job": ""}, {"restarts": 1},
        {"state": "failed", "error": '"state": "preempted",'},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_else_is(script: Script, change: dict[str, object]) -> None:
    ran = script.run(status=PREEMPTED | change, code=85)
    assert (ran.code, ran.scontrol) == (85, "")


def test_what_an_earlier_attempt_left_does_not_count(script: Script) -> None:
    assert script.run(code=7).scontrol == ""
    assert script.run(status=PREEMPTED, code=1, SLURM_RESTART_COUNT="1").scontrol == ""


def test_a_failed_requeue_is_an_error(script: Script) -> None:
    ran = script.run(status=PREEMPTED, code=85, REQUEUED="1")
    assert ran.code == 1 and "error: it could not be requeued: submit it again" in ran.out


def test_attempts_in_a_row_without_a_new_checkpoint_are_limited(script: Script) -> None:
    assert script.run(status=PREEMPTED | {"stalled": 4}, code=85).scontrol == "requeue 12\n"
    for stalled, limit in ((5, {}), (17, {}), (2, {"ALIGNMENT_MAX_STALLED": "2"})):
        ran = script.run(status=PREEMPTED | {"stalled": stalled}, code=85, **limit)
        assert (ran.code, ran.scontrol) == (1, "requeue 12\n")
        assert f"error: not requeued: {stalled} attempts in a row have not come to a new checkpoint" in ran.out


def test_a_job_that_slurm_requeues_is_limited_as_well(script: Script) -> None:
    """Its nodes fail again and again: no attempt lives to look at its end."""
    script.run(status=PREEMPTED | {"state": "running", "signal": None, "stalled": 5}, code=1)
    ran = script.run(SLURM_RESTART_COUNT="5")
    assert (ran.code, ran.srun) == (
        1,
        [],
    ) and "error: 5 attempts in a row have not come to a new checkpoint" in ran.out
    assert script.run().srun  # submitted again by a person
    assert script.run(SLURM_RESTART_COUNT="1", SLURM_JOB_ID="13").srun


@pytest.mark.parametrize("status", [PREEMPTED | {"signal": "SIGTERM"}, None], ids=["while training", "in its start"])
def test_a_job_that_is_preempted_with_a_grace_time_waits_for_its_end(
    script: Script, status: dict[str, object] | None
) -> None:
    """SLURM requeues it then; a job that ends before would have failed."""
    (script.calls / "grace").touch()
    ran = script.run(status=status, code=85)
    assert (ran.code, ran.scontrol) == (85, "")
    assert (script.calls / "squeue").read_text().count("--job 12") == 2
    (script.calls / "squeue").unlink()
    script.run(code=0)
    assert not (script.calls / "squeue").exists()


# Signals ------------------------------------------------------------------------------------------------------------

WAITING = """
trap 'echo heard USR1; sent=1' USR1
touch $CALLS/ready
for _ in {1..160}; do [[ -z $sent ]] && sleep 0.05; done
exit 85
"""


def wait_for(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_term_is_not_passed_on_and_usr1_is(script: Script) -> None:
    """srun would kill its tasks at TERM; they have got it from SLURM, and save."""
    process = script.start("kto", "--output_dir", "out", fake=WAITING)
    wait_for((script.calls / "ready").exists)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    ran = script.ran(process)
    assert ran.code == 85 and ran.out.count("heard USR1") == 1 and "told to end; waiting for the run" in ran.out


def test_the_runs_own_exit_status_survives_signals(script: Script) -> None:
    fake = "touch $CALLS/ready; while [[ ! -e $CALLS/go ]]; do sleep 0.02; done; exit 7"
    process = script.start("kto", "--output_dir", "out", fake=fake)
    wait_for((script.calls / "ready").exists)
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.03)
    (script.calls / "go").touch()
    ran = script.ran(process)
    assert ran.code == 7, ran.out
