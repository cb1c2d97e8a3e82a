"""A closed terminal: the run gets SIGHUP, and all writes to the terminal fail from then on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.cli.output import print_and_leave, surviving_closed_output
from tools.chaos.world import World
from tools.signals.worker import Plan


def test_help_on_a_closed_terminal_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        os.close(leader)
        with pytest.raises(SystemExit) as left:
            print_and_leave("usage: …")
    assert left.value.code == 0


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


@pytest.mark.parametrize(
    "bars",
    [
        pytest.param(True, marks=pytest.mark.slow, id="progress bars"),
        pytest.param(False, marks=pytest.mark.ci, id="lines"),
    ],
)
def test_a_run_saves_a_checkpoint_when_its_terminal_is_closed(bars: bool, tmp_path: Path) -> None:
    world = World.made(tmp_path / "world")
    output_dir = tmp_path / "out"
    (tmp_path / "trails").mkdir()
    plan = Plan(str(tmp_path / "trails"), str(output_dir), slow_from=2, slow=(0.3,))
    options = {"max_steps": 200, "save_steps": 100, "eval_strategy": "no", "load_best_model_at_end": False}
    options |= {"disable_tqdm": not bars, "logging_steps": 1}
    worker = ROOT / "tools" / "signals" / "worker.py"
    leader, terminal = os.openpty()

    def in_front() -> None:  # a separate session, in the foreground of this terminal
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, str(worker), *world.arguments("kto", output_dir, **options)]
    environment = {**os.environ, **plan.variable(), "PYTHONPATH": str(ROOT)}
    environment.pop("SLURM_JOB_ID", None)
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, env=environment, preexec_fn=in_front
    ) as run:
        os.close(terminal)
        step, deadline = tmp_path / "trails" / "step-0", time.monotonic() + 60
        while not step.exists() or int(step.read_text()) < 4:
            assert run.poll() is None and time.monotonic() < deadline
            if select.select([leader], [], [], 0.05)[0]:
                os.read(leader, 4096)
        os.close(leader)
        try:
            assert run.wait(30) == 85
        finally:
            run.kill()
    status = json.loads((output_dir / "status.json").read_text())
    assert (status["state"], status["signal"]) == ("preempted", "SIGHUP"), status
    assert status["checkpoint"] == f"checkpoint-{status['step']}" and status["step"] >= 4
