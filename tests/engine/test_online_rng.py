"""Rollouts and scorers use their own random streams: later draws are unaffected, and runs are reproducible."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import STAGES, make_model, options, text, train_and_close
from transformers import TrainerCallback

from alignment import OnlineDPOConfig, OnlineDPOTrainer
from alignment.online import window as online_window
from alignment.rollout.backend import Completion, RolloutRequest
from alignment.rollout.engine import RolloutEngine

Made = list[list[Completion]]
TIMES = ("runtime", "per_second")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy with dropout: the train phase draws from torch's global generator."""
    return make_model(tmp_path_factory.mktemp("models") / "policy", "untied", dropout=0.2)


def draw() -> None:
    """Draw from every generator."""
    random.random(), np.random.rand(), torch.rand(1)


def vowels(completions: list[str]) -> list[float]:
    """A reward function that draws random numbers."""
    draw()
    return quiet_vowels(completions)


def quiet_vowels(completions: list[str]) -> list[float]:
    """The same reward without drawing."""
    return [float(sum(letter in "aeiou" for letter in text) + 0.01 * len(text)) for text in completions]


def judge(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    """A judge that draws random numbers."""
    draw()
    return [int(quiet_vowels(pair)[1] > quiet_vowels(pair)[0]) for pair in pairs]


quiet_vowels.__name__ = vowels.__name__  # the name in the log


def prompts(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt": text(rng, 2, 12)} for _ in range(count)]


class Randomness(TrainerCallback):
    """Records what Python, NumPy and torch would draw next after each step."""

    def __init__(self) -> None:
        self.states: list[tuple[Any, ...]] = []

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        array = np.random.get_state()
        torch_state = torch.get_rng_state().numpy().tobytes()
        self.states.append((random.getstate(), array[1].tobytes(), array[2], torch_state))


Outcome = tuple[list[dict[str, Any]], list[tuple[Any, ...]]]


def outcome(
    model: str, folder: Path, stage: str, reward: Callable[..., list[float]] | None = vowels, **more: Any
) -> Outcome:
    """Return the log of a run of three windows without times, and the states of the generators after each."""
    given = options(folder, max_new_tokens=8, max_steps=3, disable_dropout=False, ref_placement="replica", **more)
    del given["max_prompt_length"]
    after = Randomness()
    trainer = OnlineDPOTrainer(
        model=model,
        args=OnlineDPOConfig(**{**given, "deepspeed": STAGES[stage]}),
        reward_funcs=reward,
        train_dataset=prompts(8, seed=1),
        eval_dataset=prompts(3, seed=2),
        judge=judge if reward is None else None,
        callbacks=[after],
    )
    train_and_close(trainer)
    log = [{n: v for n, v in entry.items() if not n.endswith(TIMES)} for entry in trainer.state.log_history]
    written = [json.loads(line) for line in (folder / "out" / "completions.jsonl").read_text().splitlines()]
    return [*log, *written], after.states


@pytest.mark.parametrize("stage", ["stage0", pytest.param("stage3", marks=pytest.mark.ci)])
def test_a_window_after_a_rollout_is_unchanged(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A run with given completions is bitwise equal to the run that generated them."""
    generate, made = RolloutEngine.generate, []

    def recorded(engine: RolloutEngine, request: RolloutRequest) -> Made:
        made.append(generate(engine, request))
        return made[-1]

    monkeypatch.setattr(RolloutEngine, "generate", recorded)
    log, states = outcome(model, tmp_path / "generated", stage, eval_strategy="steps", eval_steps=1)
    assert len(states) == 3 and len({state[-1] for state in states}) == 3, "dropout draws from torch's generator"
    assert len(made) == 1 + 2 * 3, "the initial policy's completions, then training and evaluation in turn"
    assert len({tuple(one.ids for group in part for one in group) for part in made}) > 4

    # Nothing draws between two train phases here.
    handed = iter(made)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutEngine, "generate", lambda engine, request: next(handed))
        patched.setattr(online_window, "seeded", lambda seed: contextlib.nullcontext())
        given = outcome(model, tmp_path / "handed", stage, quiet_vowels, eval_strategy="steps", eval_steps=1)
    assert given == (log, states)

    # Evaluations with their own rollouts do not affect training either, and runs are reproducible.
    monkeypatch.setattr(RolloutEngine, "generate", generate)
    alone = outcome(model, tmp_path / "alone", stage)
    assert alone == ([entry for entry in log if not any(name.startswith("eval_") for name in entry)], states)
    draw()  # draws before a run have no effect
    assert outcome(model, tmp_path / "again", stage) == alone


def test_random_draws_of_a_judge_do_not_affect_training(model: str, tmp_path: Path) -> None:
    """Including its comparison of two policies in an evaluation."""
    log, states = outcome(model, tmp_path / "evaluated", "stage0", None, eval_strategy="steps", eval_steps=1)
    alone = outcome(model, tmp_path / "alone", "stage0", None)
    assert alone == ([entry for entry in log if "eval_loss" not in entry], states)
    assert "eval_win_rate" in log[1]


def test_sampling_depends_on_the_seed_and_the_order_of_the_data_does_not(model: str, tmp_path: Path) -> None:
    def drawn(seed: int) -> list[tuple[str, str]]:
        log, _ = outcome(model, tmp_path / str(seed), "stage0", quiet_vowels, data_seed=42, seed=seed)
        return [(entry["prompt"], entry["chosen"]) for entry in log if "chosen" in entry]

    one, other = drawn(42), drawn(7)
    assert len(one) == 12 and [prompt for prompt, _ in one] == [prompt for prompt, _ in other]
    assert sum(mine == its for mine, its in zip(one, other)) < 3
