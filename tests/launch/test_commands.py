"""One command line for all entry points: usage lines, closed pipes and terminals, and the contents of the wheel."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import termios
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from support.bad_case import Case
from support.bad_commands import command
from support.helpers import exit_status, make_model

from alignment import __version__
from alignment.cli.commands import COMMANDS, main
from alignment.cli.help import help_text
from alignment.cli.output import print_and_leave, surviving_closed_output
from alignment.cli.parsing import parse
from alignment.config.registry import METHODS
from tools.chaos.world import World
from tools.ranks.client import environment
from tools.signals.worker import Plan

TRAIN = [sys.executable, str(ROOT / "launch" / "train.py")]


def run(command: list[str], stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    env = environment(PYTHONPATH=str(ROOT))
    return subprocess.run(command, env=env, text=True, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)


# Usage lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "called"),
    [
        (TRAIN, "launch/train.py"),
        ([sys.executable, "-m", "alignment", "train"], "python -m alignment train"),
        (
            [sys.executable, "-c", "from alignment.cli.commands import main; main()", "train"],
            "deepspeed-alignment train",
        ),
    ],
    ids=["script", "module", "console"],
)
def test_a_usage_line_names_the_command_that_was_called(command: list[str], called: str) -> None:
    done = run([*command, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == help_text(METHODS, called) + "\n"
    first, second = done.stdout.splitlines()[:2]
    assert first == f"usage: {called} [RECIPE] [--method METHOD] [--OPTION VALUE ...]"
    assert ("launch/train.py" in second) == (called == "launch/train.py")


@pytest.mark.parametrize("name", ["plan", "prepare", "vllm_serve"])
def test_commands_of_a_single_process_name_no_launcher(name: str) -> None:
    for called in (f"launch/{name}.py", f"deepspeed-alignment {name}"):
        assert help_text(METHODS, called).startswith(f"usage: {called} [RECIPE] ")
        assert "launcher" not in help_text(METHODS, called).partition("\n\n")[0]


def exits(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str, str]:
    return exit_status(main, argv, "da"), *capsys.readouterr()


@pytest.mark.parametrize("argv", [(), ("--help",)])
def test_without_a_command_all_are_listed(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = exits(capsys, *argv)
    assert (code, err) == (0, "") and out.startswith("usage: da COMMAND")
    listed = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  ")]
    assert listed == [[name, text] for name, text in COMMANDS.items()]


@pytest.mark.parametrize("given", [["--local_rank=1"], ["--local-rank", "1"]])
def test_arguments_added_by_deepspeeds_launcher(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(capsys, *given, "--version") == (0, f"deepspeed-alignment {__version__}\n", "")


@pytest.mark.parametrize(
    ("argument", "says"), [("--help", "usage: "), ("--version", f"deepspeed-alignment {__version__}\n")]
)
def test_only_the_first_rank_prints_the_options(
    argument: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        status, said = exit_status(parse, ["kto", argument]), capsys.readouterr().out
        assert status == 0 and said.startswith(says) == (rank == 0)


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name, hint in (("trian", "did you mean 'train'?"), ("kto.yaml", "did you mean da train kto.yaml?")):
        code, out, err = exits(capsys, name, "--beta", "1")
        assert (code, out) == (2, "") and err.startswith(f"error: unknown command {name!r}; {hint}")


# Closed pipes and terminals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["status", "--help"]], ids=" ".join)
def test_printing_commands_exit_quietly_if_the_pipe_is_closed(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run([sys.executable, "-m", "alignment", *arguments], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("opened", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_output_is_discarded_after_the_pipe_is_closed(
    opened: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = opened()
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with surviving_closed_output():
            print("read", flush=True)
            os.close(reader)
            for _ in range(3):
                print("unread")
                sys.stdout.flush()
            os.write(writer, b"written by a library")


def test_help_on_a_closed_terminal_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        os.close(leader)
        assert exit_status(print_and_leave, "usage: …") == 0


def test_a_failing_disk_is_not_treated_as_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the output is a file on that disk, the user must be told."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with surviving_closed_output():
            print("lost")
            with pytest.raises(OSError) as failed:
                sys.stdout.flush()
        assert failed.value.errno == errno.ENOSPC
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


# Control characters and bars of what draws itself again, numbers with too many digits, dicts.
REDRAWN = re.compile(r"[\r\x1b]|%\||\d{10}|\{'")


@pytest.mark.ci
def test_a_run_saves_a_checkpoint_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """And with ``disable_tqdm``, nothing draws itself again in the terminal."""
    world = World.made(tmp_path / "world")
    output_dir = tmp_path / "out"
    (tmp_path / "trails").mkdir()
    plan = Plan(str(tmp_path / "trails"), str(output_dir), slow_from=2, slow=(0.3,))
    options = {"max_steps": 200, "save_steps": 100, "eval_strategy": "no", "load_best_model_at_end": False}
    options |= {"disable_tqdm": True, "logging_steps": 1}
    worker = ROOT / "tools" / "signals" / "worker.py"
    leader, terminal = os.openpty()

    def in_front() -> None:  # a separate session, in the foreground of this terminal
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    run_worker = [sys.executable, str(worker), *world.arguments("kto", output_dir, **options)]
    variables = {**os.environ, **plan.variable(), "PYTHONPATH": str(ROOT)}
    variables.pop("SLURM_JOB_ID", None)
    with subprocess.Popen(
        run_worker, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, env=variables, preexec_fn=in_front
    ) as run:
        os.close(terminal)
        step, deadline, shown = tmp_path / "trails" / "step-0", time.monotonic() + 60, b""
        while not step.exists() or int(step.read_text()) < 4:
            assert run.poll() is None and time.monotonic() < deadline
            if select.select([leader], [], [], 0.05)[0]:
                shown += os.read(leader, 4096)
        os.close(leader)
        try:
            assert run.wait(30) == 85
        finally:
            run.kill()
    status = json.loads((output_dir / "status.json").read_text())
    assert (status["state"], status["signal"]) == ("preempted", "SIGHUP"), status
    assert status["checkpoint"] == f"checkpoint-{status['step']}" and status["step"] >= 4
    log = shown.decode(errors="replace").replace("\r\n", "\n")
    assert "\nstep   2/200: " in log and not REDRAWN.search(log), log


# The log of a run ---------------------------------------------------------------------------------------------------

NUMBER = r"-?[\d.,]+(?:e-?\d+)?"


@pytest.mark.ci
def test_a_run_in_a_log_file(tmp_path: Path) -> None:
    """One line per logging step and evaluation, and nothing that draws itself again, also not by libraries."""
    make_model(tmp_path / "good")
    given = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "epoch", "dataset_test_split": "train[:2]"}
    arguments = command(Case("kto", (), given), tmp_path, tmp_path)
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run([*TRAIN, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    log = done.stdout.decode()
    assert not REDRAWN.search(log), log
    metrics = rf"loss {NUMBER}, margin {NUMBER}, kl {NUMBER}"
    step = rf"epoch {NUMBER}, {metrics}, lr {NUMBER}, {NUMBER} tokens/s, {NUMBER} GiB"
    wanted = [rf"step 1/2: {step}, {NUMBER} s left", rf"step 2/2: {step}", rf"step 2/2, eval: {metrics}, {NUMBER} s"]
    said = [line for line in log.splitlines() if line.startswith("step")]
    assert len(said) == len(wanted) and all(map(re.fullmatch, wanted, said)), log
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert len(repr(next(record["grad_norm"] for record in records if "loss" in record))) > 12, "in full precision"


# The wheel ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, because the build leaves files in its folder."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("alignment", "ds_configs", "launch", "examples", "benchmarks", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.mark.ci
def test_the_contents_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {f"alignment/{path.relative_to(ROOT / 'alignment')}" for path in (ROOT / "alignment").rglob("*.py")}
    expected |= {f"alignment/ds_configs/{path.name}" for path in (ROOT / "ds_configs").glob("*.json")}
    expected |= {f"alignment/launch/recipes/{path.name}" for path in (ROOT / "launch" / "recipes").glob("*.yaml")}
    expected |= {f"alignment/launch/slurm/{path.name}" for path in (ROOT / "launch" / "slurm").glob("*.sbatch")}
    templates = (ROOT / "alignment" / "reporting" / "templates").iterdir()
    expected |= {f"alignment/reporting/templates/{path.name}" for path in templates}
    assert expected | {"alignment/py.typed"} <= names
    others = {name for name in names - expected if not name.startswith("deepspeed_alignment-")}
    scripts = {f"alignment/launch/{path.name}" for path in (ROOT / "launch").glob("*.py")}
    assert others <= {"alignment/py.typed", "alignment/ds_configs/README.md", *scripts}


@pytest.mark.ci
def test_the_installed_wheel_includes_the_recipes(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-m", "alignment", "train"]
    env = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run([*command, "--help"], env=env, cwd=tmp_path, text=True, capture_output=True, check=True)
    recipes = sorted(path.stem for path in (ROOT / "launch" / "recipes").glob("*.yaml"))
    assert f"({', '.join(recipes)})" in done.stdout
    wrong = subprocess.run([*command, "kto"], env=env, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1) and wrong.stderr.startswith(
        "error: dataset_name is required"
    )
