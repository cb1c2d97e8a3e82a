"""Progress bars of rollouts and evaluations."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drivers.rollout import PROMPTS, policy_engine, sampling
from helpers import make_model, options

from alignment import OnlineDPOConfig, OnlineDPOTrainer
from alignment.engines.scoring import PolicyEngine
from alignment.reporting.progress import Progress
from alignment.rollout import engine as rollout_engine
from alignment.rollout.backend import Completion, RolloutRequest
from alignment.rollout.engine import RolloutEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "untied")


@pytest.fixture(scope="module")
def policy(model: str) -> Any:
    made = policy_engine(model, "stage0")
    yield made
    made.close()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(position, total) of every bar of a rollout after every update."""
    found: list[tuple[int, int]] = []

    class Bar(rollout_engine.tqdm):  # type: ignore[misc]
        def __init__(self, **more: Any) -> None:
            super().__init__(file=io.StringIO(), **more)

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            found.append((int(self.n), self.total))
            return shown

    monkeypatch.setattr(rollout_engine, "tqdm", Bar)
    return found


def rollout(policy: PolicyEngine, progress: bool, batch_size: int | None, **more: Any) -> list[list[Completion]]:
    engine = RolloutEngine(policy, "generate", longest_context=64, progress=progress, batch_size=batch_size)
    return engine.generate(RolloutRequest(PROMPTS, 2, sampling(**more), 5))


def test_one_chunk_updates_the_bar_at_every_token(policy: PolicyEngine, moves: list[tuple[int, int]]) -> None:
    shown = rollout(policy, True, None, eos_token_ids=())
    assert moves == [*((step, 8) for step in range(1, 9)), (8, 8)]
    assert rollout(policy, False, None, eos_token_ids=()) == shown


def test_a_chunk_that_ends_early_counts_in_full(policy: PolicyEngine, moves: list[tuple[int, int]]) -> None:
    shown = rollout(policy, True, 4, eos_token_ids=tuple(range(77)))
    assert moves == [(1, 16), (8, 16), (9, 16), (16, 16)]
    assert rollout(policy, False, 4, eos_token_ids=tuple(range(77))) == shown


def test_a_rollout_has_one_bar(policy: PolicyEngine, capfd: pytest.CaptureFixture[str]) -> None:
    rollout(policy, True, None)
    assert "rollout:" in capfd.readouterr().err
    rollout(policy, False, None)
    assert capfd.readouterr() == ("", "")


def test_consumed_items_update_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(7, "eval", True, torch.device("cpu"))
    items = bar.watch(["a", "b"], 2)
    assert [*items, items[0]] == ["a", "b", "a"] and len(items) == 2
    with pytest.raises(IndexError):
        items[2]
    bar.close()
    assert "3/4" in capsys.readouterr().err.split("\r")[-1]


def test_prompts_do_not_update_the_bar_of_an_evaluation(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            events.append(name)
            return function(*args, **more)

        return run

    given = options(tmp_path, max_new_tokens=8, per_device_eval_batch_size=2)
    rows = [{"prompt": word} for word in ("abc", "b", "cab", "ac")]
    trainer = OnlineDPOTrainer(
        model=model,
        reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions],
        args=OnlineDPOConfig(**{key: value for key, value in given.items() if key != "max_prompt_length"}),
        train_dataset=rows,
        eval_dataset=rows,
    )
    monkeypatch.setattr(RolloutEngine, "generate", noted(RolloutEngine.generate, "rollout"))
    monkeypatch.setattr(Progress, "advance", noted(Progress.advance, "batch"))
    try:
        trainer.evaluate()
    finally:
        trainer.close()
    assert events[0] == "rollout" and events.count("rollout") == 1 and events.count("batch") >= 1
