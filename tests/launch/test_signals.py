"""Signals to launchers and workers of real runs: the most important cells of `make signals`, and shell behavior.

The complete table is in ``tools/signals/expected.txt``.
"""

from __future__ import annotations

import json
import os
import pty
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from tools.chaos.judge import look
from tools.ranks import RankServer
from tools.ranks.client import LAUNCHER_VARIABLES
from tools.signals.command import Launched, end_processes, launch_command
from tools.signals.judge import status
from tools.signals.plan import table
from tools.signals.run import SCHEDULED, STEPS, WORKER, Signals
from tools.signals.worker import VARIABLE, Plan, Trail
from tools.trial import workspace

CELLS = {cell.name: cell for cell in table()}
pytestmark = pytest.mark.usefixtures("launch")  # to run them with the tests that start processes


@pytest.fixture(scope="module")
def signals(ranks: RankServer) -> Iterator[Signals]:
    with workspace("signals-") as folder:
        yield Signals(ranks, folder)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torchrun launcher TERM kto", marks=pytest.mark.faults),  # a scheduler's signal, forwarded
        pytest.param("deepspeed launcher KILL online_dpo", marks=pytest.mark.faults),  # workers without a launcher
        pytest.param("deepspeed group INT kto", marks=pytest.mark.slow),  # Ctrl-C
        pytest.param("torchrun rank1 KILL kto", marks=pytest.mark.faults),  # out of memory
        pytest.param("deepspeed rank0 KILL kto", marks=pytest.mark.slow),
    ],
)
def test_a_signal(signals: Signals, name: str) -> None:
    cell = CELLS[name]
    seen = signals.make(cell, table()[cell])
    assert not seen.problems, f"{seen.problems}\n{seen.output}"


@pytest.mark.slow
def test_a_second_start_does_not_interfere_with_the_first(signals: Signals, tmp_path: Path) -> None:
    """The runner is killed while its workers are in a long step, and the same command is started immediately."""
    output_dir = tmp_path / "out"
    plan = Plan(str(tmp_path / "trails"), str(output_dir), slow_from=SCHEDULED + 2, slow=(15.0, 15.0))
    command = [*launch_command(WORKER, 2, "deepspeed"), *signals.arguments("kto", output_dir)]
    first = Launched(command, plan, 2, tmp_path / "log")
    try:
        first.wait_for_step(SCHEDULED + 2)
        first.process.kill()
        second = signals.server.run(signals.program, *signals.arguments("kto", output_dir), check=False, timeout=60)
        left = len(list(first.processes()))
        end = first.wait()
    finally:
        first.end()
    assert left >= 2, "the first one had gone before the second was refused"
    assert [one.code for one in second.ranks] == [1, 1]
    assert "is in use by process" in second.stderr, second.report()
    assert end.left == () and end.ranks == (85, 85)
    assert look(output_dir).steps == (SCHEDULED, SCHEDULED + 2)
    assert signals.go_on("kto", 2, output_dir) == []


@pytest.mark.faults
def test_a_closed_terminal(signals: Signals, tmp_path: Path) -> None:
    """Two background runs of a shell whose terminal is closed: the one with `nohup` continues to its end."""
    shell, terminal = pty.fork()
    if shell == 0:
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    runs: dict[str, Path] = {name: tmp_path / name for name in ("nohup", "plain")}
    plans: list[Plan] = []
    for name, folder in runs.items():
        (folder / "trails").mkdir(parents=True)
        plans.append(Plan(str(folder / "trails"), str(folder / "out"), slow_from=SCHEDULED + 2, slow=(0.4,)))
        script = folder / "start.sh"
        arguments = [sys.executable, str(WORKER), *signals.arguments("kto", folder / "out")]
        variables = {"PYTHONPATH": str(ROOT), VARIABLE: plans[-1].variable()[VARIABLE]}
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        script.write_text(f"exec env {settings} {shlex.join(arguments)}\n")
        before = "nohup " if name == "nohup" else ""
        os.write(terminal, f"{before}sh {script} > {folder / 'log'} 2>&1 &\n".encode())
    try:
        wait_for_steps([Trail(folder / "trails", 0) for folder in runs.values()], SCHEDULED + 2)
        os.close(terminal)
        os.waitpid(shell, 0)
        wait_for_end(runs["plain"])
        wait_for_end(runs["nohup"])
    finally:
        for plan in plans:
            end_processes(plan)
    told = {name: status(folder / "out") for name, folder in runs.items()}
    logs = "\n".join((folder / "log").read_text() for folder in runs.values())
    assert (told["plain"]["state"], told["plain"]["signal"]) == ("preempted", "SIGHUP"), logs
    assert SCHEDULED + 2 <= max(look(runs["plain"] / "out").steps) < STEPS
    assert (told["nohup"]["state"], told["nohup"]["signal"]) == ("finished", None), logs
    codes = [Trail(folder / "trails", 0).get("code") for folder in runs.values()]
    assert codes == [0, 85]


def wait_for_steps(trails: list[Trail], step: int, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while any((trail.get("step") or 0) < step for trail in trails):
        assert time.monotonic() < end, f"step {step} was not reached"
        time.sleep(0.05)


def wait_for_end(folder: Path, rank: int = 0, seconds: float = 45.0) -> None:
    end = time.monotonic() + seconds
    while Trail(folder / "trails", rank).get("code") is None:
        assert time.monotonic() < end, json.dumps(status(folder / "out"))
        time.sleep(0.05)
