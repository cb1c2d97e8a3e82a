"""Ranks that are stopped, killed or hang during real runs: the others detect it in time and name them.

Two ranks without a launcher, which would stop the other rank. Faults happen at events of ``tools/chaos``, in
``tools/signals/worker.py``. The tests are ``ci``, so that mutations can be tested with them; less important ones are
``slow``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.judge import compare, look
from tools.ranks import Outcome, RankServer
from tools.signals.__main__ import Signals
from tools.signals.worker import WORKER, Plan, Trail
from tools.trial import workspace

PEER_TIMEOUT = 5.0
HOST = re.escape(socket.gethostname())


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
@pytest.mark.parametrize(
    ("rank", "event", "occurrence"), [(1, "after forward in train", 30), (0, "before loading a model in build", 1)]
)
def test_a_rank_is_stopped(signals: Signals, place: Path, rank: int, event: str, occurrence: int) -> None:
    """With SIGSTOP, as by a debugger. Rank 0 serves the store, so calls to it hang as well."""
    run = Run(signals, place, "kto", {"rank": rank, "event": event, "occurrence": occurrence}, {})
    done = run()
    assert run.since_fault(rank) < PEER_TIMEOUT + 6
    assert [one.code for one in done.ranks] == [-signal.SIGKILL if one.rank == rank else 1 for one in done.ranks]
    phase = r"\w*load\w*, step 0" if rank == 0 else r"(step|train\w*), step \d+"
    assert re.search(rf"rank {rank} \(host {HOST}.* in phase {phase}", last_line(done)), done.report()
    assert (run.output_dir / f"hang-{1 - rank}.txt").exists(), "of the surviving rank"
    assert not look(run.output_dir).problems


@pytest.mark.parametrize(("rank", "phase"), [(1, "rollout")])
@pytest.mark.ci
def test_the_main_thread_of_a_rank_hangs(signals: Signals, place: Path, rank: int, phase: str) -> None:
    """Its other threads are alive, so its heartbeat continues; every rank writes its stacks."""
    plan = {"rank": rank, "event": f"after forward in {phase}", "occurrence": 40, "fault": "sleep"}
    limits = {"hang_timeout": 3, "hang_timeout_first": 8, "peer_timeout": 25}
    run = Run(signals, place, "online_dpo", plan, limits)
    done = run()
    assert run.since_fault(rank) < 8 + 6
    assert [one.code for one in done.ranks] == [1, 1]
    line = last_line(done)
    assert "no progress for" in line and re.search(rf"rank {rank} \(host {HOST}.* in phase {phase}", line), line
    stacks = [(run.output_dir / f"hang-{each}.txt").read_text() for each in (0, 1)]
    assert "_fail" in stacks[rank] and "_fail" not in stacks[1 - rank]
    assert json.loads((run.output_dir / "status.json").read_text())["state"] == "failed"


@pytest.mark.ci
def test_a_long_rollout_is_not_interrupted(signals: Signals, place: Path) -> None:
    """Rollouts take longer than all limits, but each token is progress, and the other rank waits."""
    plan = {"rank": 1, "event": "after forward in rollout", "fault": "slow"}
    once = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no", "max_steps": 1}
    limits = {"hang_timeout": 10.0, "hang_timeout_first": 10.0, "hang_factor": 1.0}
    run = Run(signals, place, "online_dpo", plan, {**limits, **once, "max_new_tokens": 24, "rollout_batch_size": 1})
    done = run()
    assert done.returncode == 0, done.report()
    lines = [json.loads(line) for line in (run.output_dir / "log.jsonl").read_text().splitlines()]
    rollouts = next(line["phases"]["rollout"] for line in lines if "phases" in line)
    assert rollouts["seconds"] > 10.0 * rollouts["entries"]


def run_and(act: Callable[[list[int]], None], run: Run, step: int) -> Outcome:
    """Run, and apply an action to its processes in a step."""

    def wait() -> None:
        while any(run.trail(rank).get("pid") is None or (run.trail(rank).get("step") or 0) < step for rank in (0, 1)):
            time.sleep(0.05)
        act([run.trail(rank).pid for rank in (0, 1)])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    done = run()
    thread.join(5)
    return done


@pytest.mark.slow
def test_a_suspended_job_continues(signals: Signals, place: Path) -> None:
    """Both ranks are stopped for longer than peer_timeout, as by a scheduler that suspends jobs, then continued."""
    run = Run(signals, place, "kto", {"slow_from": 4, "slow": (0.2, 0.2)}, {})

    def suspend(pids: list[int]) -> None:
        for number, pause in ((signal.SIGSTOP, PEER_TIMEOUT + 3), (signal.SIGCONT, 0)):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(pause)

    done = run_and(suspend, run, 5)
    assert done.returncode == 0, done.report()
    assert compare(run.output_dir, signals.reference("kto", 2), ()) == []


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
    once = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no", "max_steps": 1}
    run = Run(signals, place, "online_dpo", plan, {**once, "max_new_tokens": 16, "rollout_batch_size": 1})
    asked: list[float] = []

    def ask(pids: list[int]) -> None:
        while not (place / "trails" / "fault-1").exists():
            time.sleep(0.05)
        time.sleep(1.0)
        asked.append(time.time())
        os.kill(pids[0], signal.SIGTERM)

    done = run_and(ask, run, 0)
    assert [one.code for one in done.ranks] == [85, 85], done.report()
    assert time.time() - asked[0] < 10, "a chunk takes 4 s, the rollout several of them"
    assert "preempted by SIGTERM after step 0" in done.stderr
    assert json.loads((run.output_dir / "status.json").read_text())["signal"] == "SIGTERM"
