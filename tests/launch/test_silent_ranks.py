"""Ranks that are stopped, killed or hang during real runs: the others detect it in time and name them.

Two ranks without a launcher, which would stop the other rank. Faults happen at events of ``tools/chaos``, in
``tools/signals/worker.py``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS
from support.helpers import make_model

from tools.chaos.judge import look
from tools.ranks import Outcome, RankServer
from tools.signals.__main__ import Signals
from tools.signals.worker import WORKER, Plan, Trail
from tools.trial import workspace

PEER_TIMEOUT = 5.0
ONCE = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no", "max_steps": 1}


@pytest.fixture(scope="module")
def signals(ranks: RankServer) -> Iterator[Signals]:
    with workspace("silent-") as folder:
        yield Signals(ranks, folder)


@dataclass
class Run:
    """A run with two ranks that have a plan."""

    signals: Signals
    place: Path
    method: str
    plan: dict[str, Any]
    options: dict[str, object]

    @property
    def output_dir(self) -> Path:
        return self.place / "out"

    def trail(self, rank: int) -> Trail:
        return Trail(self.place / "trails", rank)

    def __call__(self, grace: float = 20) -> Outcome:
        trails = self.place / "trails"
        trails.mkdir(parents=True)
        plan = Plan(folder=str(trails), output_dir=str(self.output_dir), **self.plan)
        arguments = self.signals.arguments(
            self.method, self.output_dir, **{"peer_timeout": PEER_TIMEOUT, **self.options}
        )
        return self.signals.server.run(WORKER, *arguments, env=plan.variable(), timeout=60, grace=grace, check=False)

    def since_fault(self, rank: int) -> float:
        """Return the seconds since the fault of a rank."""
        return time.time() - (self.place / "trails" / f"fault-{rank}").stat().st_mtime


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run"


def last_line(done: Outcome) -> str:
    """Return the last line, after checking that it is the only error; a rank that lost the store repeats it."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert {line for line in lines if line.startswith("error:")} == {lines[-1]}, done.report()
    return lines[-1]


@pytest.mark.ci
def test_rank_0_is_stopped(signals: Signals, place: Path) -> None:
    """With SIGSTOP, as by a debugger. It serves the store, so calls to it hang as well."""
    run = Run(signals, place, "kto", {"rank": 0, "event": "before loading a model in build", "occurrence": 1}, {})
    done = run()
    assert run.since_fault(0) < PEER_TIMEOUT + 15
    assert [one.code for one in done.ranks] == [-signal.SIGKILL, 1]
    said = rf"rank 0 \(host {re.escape(socket.gethostname())}.* in phase \w*load\w*, step 0"
    assert re.search(said, last_line(done)), done.report()
    assert (run.output_dir / "hang-1.txt").exists(), "of the surviving rank"
    assert not look(run.output_dir).problems


@pytest.mark.ci
def test_a_long_rollout_is_not_interrupted(signals: Signals, place: Path) -> None:
    """Rollouts take longer than all limits, but each token is progress, and the other rank waits."""
    plan = {"rank": 1, "event": "after forward in rollout", "fault": "slow"}
    limits = {"hang_timeout": 10.0, "hang_timeout_first": 10.0, "hang_factor": 1.0}
    run = Run(signals, place, "online_dpo", plan, {**limits, **ONCE, "max_new_tokens": 16, "rollout_batch_size": 1})
    done = run()
    assert done.returncode == 0, done.report()
    lines = [json.loads(line) for line in (run.output_dir / "log.jsonl").read_text().splitlines()]
    rollouts = next(line["phases"]["rollout"] for line in lines if "phases" in line)
    assert rollouts["seconds"] > 10.0 * rollouts["entries"]


@pytest.mark.ci
def test_a_rank_is_killed_after_the_other_has_finished(signals: Signals, place: Path) -> None:
    """The other rank waits in the guard, which has no time limit for a rank that is still working."""
    done = Run(signals, place, "kto", {"rank": 0, "event": "after rename report.md", "fault": "kill"}, {})()
    assert [one.code for one in done.ranks] == [-signal.SIGKILL, 1], done.report()
    assert done.ranks[1].seconds - done.ranks[0].seconds < 8
    assert "rank 0 " in last_line(done) and "was killed" in last_line(done)


@pytest.mark.ci
def test_a_rank_in_a_long_rollout_learns_of_a_stop_request_to_another_rank(signals: Signals, place: Path) -> None:
    """`launch.py` sends SIGTERM to the first rank only, and kills it 30 s later; that rank waits for the others."""
    plan = {"rank": 1, "event": "after forward in rollout", "fault": "slow"}
    run = Run(signals, place, "online_dpo", plan, {**ONCE, "max_new_tokens": 16, "rollout_batch_size": 1})
    asked: list[float] = []

    def ask() -> None:
        while not (place / "trails" / "fault-1").exists():
            time.sleep(0.05)
        time.sleep(1.0)
        asked.append(time.time())
        os.kill(run.trail(0).pid, signal.SIGTERM)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    done = run()
    thread.join(5)
    assert [one.code for one in done.ranks] == [85, 85], done.report()
    assert time.time() - asked[0] < 10, "a chunk takes 4 s, the rollout several of them"
    assert "preempted by SIGTERM after step 0" in done.stderr
    assert json.loads((run.output_dir / "status.json").read_text())["signal"] == "SIGTERM"


# Scripts that call ``train()`` without a command are protected as well -----------------------------------------------

PLACE = r"in phase \w+, step 2"


@pytest.mark.parametrize(
    ("fault", "codes", "says", "stacks"),
    [
        pytest.param("stop", [1, -9], rf"rank 1 .*{PLACE}: .* the process is suspended", [0], marks=pytest.mark.ci),
        ("kill", [1, -9], rf"rank 1 .*{PLACE} was killed", []),
        pytest.param("sleep", [1, 1], rf"no progress for .*rank 1 .*{PLACE}", [0, 1], marks=pytest.mark.ci),
        pytest.param("lock", [1, 1], rf"rank 1 .*{PLACE}: .* interpreter lock", [0], marks=pytest.mark.ci),
        pytest.param(
            "error", [1, 0], r"rank 1 in phase training, step 2: ZeroDivisionError", [], marks=pytest.mark.ci
        ),
        pytest.param(
            "exit", [1, 0], r"rank 1 in phase training, step 2: exited with status 0", [], marks=pytest.mark.ci
        ),
        pytest.param("term", [85, 85], "", [], marks=pytest.mark.ci),
        ("none", [0, 0], "", []),
    ],
)
def test_a_rank_of_a_script_fails(
    fault: str, codes: list[int], says: str, stacks: list[int], tmp_path: Path, ranks: RankServer
) -> None:
    model = make_model(tmp_path / "model", layers=1)
    done = ranks.run(DRIVERS / "plain_script.py", fault, tmp_path, model, timeout=60, grace=30, check=False)
    assert [one.code for one in done.ranks] == codes, done.report()
    assert re.search(says, done.stderr), done.report()
    assert [number for number in (0, 1) if (tmp_path / "out" / f"hang-{number}.txt").exists()] == stacks
    assert says or fault == "term" or "error" not in done.stderr
    assert done.stdout.count("stopped") == (2 if fault == "term" else 0), "every rank can catch it"
    assert fault != "none" or not list(tmp_path.glob("alignment-hang-*"))
    if fault == "lock":  # its dead-man switch has ended it
        assert any("on_step_begin" in path.read_text() for path in tmp_path.glob("alignment-hang-1-*"))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("fault", "caught"), [("data", ["KeyError", "OtherRankFailed"]), ("model", ["OtherRankFailed", "ModelError"])]
)
def test_an_error_of_one_rank_is_raised_on_all_ranks(
    fault: str, caught: list[str], tmp_path: Path, ranks: RankServer
) -> None:
    """Otherwise they would wait for hours, if the script catches it."""
    model = make_model(tmp_path / "model", layers=1)
    done = ranks.run(DRIVERS / "plain_script.py", fault, tmp_path, model, timeout=60)
    assert [one.stdout.splitlines()[-1] for one in done.ranks] == [f"caught {error}" for error in caught]
