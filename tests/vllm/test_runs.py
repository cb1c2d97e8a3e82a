"""Online DPO with a real vLLM server: full models and adapters, ranks, ZeRO stages, rewards, and servers that die."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.helpers import Acts, train_and_close
from support.vllm_runs import make
from support.vllm_server import TARGETS, RealServer, program

from alignment.checkpoint.folder import checkpoints
from alignment.config.errors import TrainingError
from alignment.rollout.vllm.client import Client
from alignment.rollout.vllm.rollout import DIFFERENCE
from tools.ranks import RankServer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("own_process_group")]
long = pytest.mark.slow
short = pytest.mark.ci

DRIVERS = Path(__file__).resolve().parents[1] / "support" / "drivers"
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": TARGETS}
ZERO_3 = {"deepspeed": {"zero_optimization": {"stage": 3}}}
PATIENT = {"vllm_server_timeout": 60.0}
SAVED = {"save_strategy": "steps", "save_steps": 1}
EXACT = 1e-4
# The call of a client's method in the third step. Completions are also generated at the start and in a rehearsal.
CALLS = {"generate": 5, "load_adapter": 3, "reload": 3, "set_version": 3, "step": 3}


def check(log: list[dict[str, Any]], steps: int = 3, most: float = EXACT) -> None:
    """Each rollout's log-probs were those of the policy."""
    found = [entry[DIFFERENCE] for entry in log if DIFFERENCE in entry]
    assert len(found) == steps and 0 < max(found) <= most


@pytest.mark.parametrize(
    ("more", "judged"),
    [
        pytest.param({}, False, marks=short, id="full, reward function"),
        pytest.param(LORA | ZERO_3, True, marks=short, id="adapters, stage 3, judge"),
        pytest.param(ZERO_3, True, marks=long, id="full, stage 3, judge"),
        pytest.param(LORA, False, marks=long, id="adapters, reward function"),
    ],
)
def test_a_run_with_a_server(vllm_server: RealServer, tmp_path: Path, more: dict[str, Any], judged: bool) -> None:
    trainer = train_and_close(make(vllm_server.url, vllm_server.model, tmp_path, judged=judged, **PATIENT | more))
    check(trainer.state.log_history)


@long
def test_two_ranks_with_one_server(vllm_server: RealServer, tmp_path: Path, ranks: RankServer) -> None:
    kinds = {"adapters": LORA, "adapters, stage 3": LORA | ZERO_3, "full": {}, "full, stage 3": ZERO_3 | {"rows": 5}}
    spec = {
        name: {"url": vllm_server.url, "model": vllm_server.model, "more": PATIENT | more, "stop": None}
        for name, more in kinds.items()
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    ranks.run(DRIVERS / "vllm_ranks.py", tmp_path / "spec.json", timeout=300)
    found = json.loads((tmp_path / "rank0.json").read_text())
    for name in kinds:
        assert found[name]["error"] == "", name
        check(found[name]["log"])


@long
@pytest.mark.parametrize("more", [LORA, {}], ids=["adapters", "full"])
def test_a_colocated_server_lives_as_long_as_the_run(served: str, tmp_path: Path, more: dict[str, Any]) -> None:
    given = {"vllm_mode": "colocate", "vllm_executable": str(program()), "vllm_server_timeout": 400.0, "use_cpu": True}
    before = servers_of(served)  # the server that tests share
    trainer = train_and_close(make(None, served, tmp_path, **given | more))
    check(trainer.state.log_history)
    assert servers_of(served) == before


def servers_of(model: str) -> list[int]:
    """The processes of servers of a model."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if {"serve", model} <= {*(one.info["cmdline"] or ())}]


@long
def test_the_reward_rises_as_with_the_policys_own_completions(vllm_server: RealServer, tmp_path: Path) -> None:
    def low(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(each < 30 for each in ids) / len(ids) for ids in completion_ids]

    def gain(name: str, **more: Any) -> float:
        given = LORA | PATIENT | {"max_steps": 60, "num_generations": 4, "reward": low, "beta": 0.02} | more
        trainer = train_and_close(make(vllm_server.url, vllm_server.model, tmp_path / name, **given))
        scores = [one["objective/scores"] for one in trainer.state.log_history if "objective/scores" in one]
        assert len(scores) == 60
        return float(sum(scores[-15:]) - sum(scores[:15])) / 15

    own = {"rollout_backend": "generate", "vllm_server_base_url": None, "vllm_server_timeout": 240.0}
    by_server, by_itself = gain("vllm"), gain("generate", **own)
    assert by_itself > 0.1 and by_server > 0.1 and abs(by_server - by_itself) < 0.5 * by_itself


# Servers and runs that are killed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of its own for the tests that kill it."""
    with contextlib.closing(RealServer(served, tmp_path_factory.mktemp("mortal"))) as server:
        yield server


def killed_at(moment: str, server: RealServer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kill the server at a moment of the second step; return callbacks of the run."""
    if moment == "before the start":
        server.kill()
    if moment == "after a step":
        return [Acts("on_step_end", 1, server.kill)]
    name = {"in an update": "load_adapter", "before completions": "generate", "in completions": "generate"}.get(moment)
    if name is not None:
        original, calls = getattr(Client, name), [0]

        def counted(self: Client, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == CALLS[name] - 1:
                after = 0.3 if moment == "in completions" else 0.0
                threading.Timer(after, server.kill).start() if after else server.kill()
            return original(self, *args)

        monkeypatch.setattr(Client, name, counted)
    return []


@long
@pytest.mark.parametrize(
    "moment", ["before the start", "in an update", "before completions", "in completions", "after a step"]
)
def test_a_run_resumes_with_a_new_server_after_the_first_was_killed(
    mortal: RealServer, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = LORA | SAVED | {"vllm_server_timeout": 4.0, "max_new_tokens": 48, "max_length": 96}
    mortal.revive()
    with monkeypatch.context() as patched:
        patched.setenv("VLLM_API_KEY", mortal.key)
        callbacks = killed_at(moment, mortal, patched)
        with pytest.raises(TrainingError):
            train_and_close(make(mortal.url, mortal.model, tmp_path, *callbacks, **given))
    assert len(checkpoints(tmp_path / "out")) == (0 if moment == "before the start" else 1)
    mortal.revive()
    monkeypatch.setenv("VLLM_API_KEY", mortal.key)
    trainer = make(mortal.url, mortal.model, tmp_path, **given | PATIENT)
    resumed = moment != "before the start"
    train_and_close(trainer, resume_from_checkpoint=resumed)
    assert trainer.state.global_step == 3
    check(trainer.state.log_history)


@long
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("alignment.rollout.vllm.client.Client.reload", {}),
        ("alignment.rollout.vllm.client.Client.set_version", {}),
        ("alignment.rollout.vllm.client.Client.load_adapter", LORA),
        ("alignment.rollout.vllm.client.Client.generate", LORA),
        ("alignment.engines.scoring.PolicyEngine.step", LORA),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_a_run_resumes_with_the_same_server_after_it_was_killed(
    vllm_server: RealServer, tmp_path: Path, ranks: RankServer, method: str, more: dict[str, Any]
) -> None:
    given = PATIENT | SAVED | more
    spec = {
        "url": vllm_server.url,
        "model": vllm_server.model,
        "folder": str(tmp_path),
        "method": method,
        "call": CALLS[method.rpartition(".")[2]],
        "more": given,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    outcome = ranks.run(DRIVERS / "vllm_killed.py", tmp_path / "spec.json", nproc=1, check=False)
    assert outcome.returncode != 0
    saved = len(checkpoints(tmp_path / "out"))
    assert saved >= 1
    trainer = train_and_close(make(vllm_server.url, vllm_server.model, tmp_path, **given), resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    check(trainer.state.log_history)
