"""Small tables about runs: what a resume compares and suggests, requests of callbacks, advice, torn lines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from alignment import CPOConfig, KTOConfig
from alignment.checkpoint.manifest import Manifest
from alignment.checkpoint.resume import Checkpoint, check_same_run
from alignment.config.errors import OptionError
from alignment.reporting.model_card import ModelCard
from alignment.run.stop import REQUESTS, StopReason
from alignment.training import callbacks, trainer
from alignment.training.advice import about_learning_rate
from alignment.training.callbacks import Decision, Events

# Resuming ------------------------------------------------------------------------------------------------------------


CURRENT = Manifest("", 0, "kto", 1, 0, 8, 50, True, {}, {"data": "a"}, {"beta": 0.1}, {})
CHECKPOINT = Checkpoint(Path("checkpoint-4"), replace(CURRENT, run="r", step=4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"total_steps": 51}, None),
        ({"total_steps": 49}, "the number of steps was 50, is 49"),
        ({"options": {"beta": 0.2}}, "beta was 0.1, is 0.2"),
        ({"options": {}}, None),
        ({"options": {"beta": 0.1, "x": "y"}}, "x was missing, is y"),
        ({"options": {"beta": 0.1, "x": None}}, None),
        ({"fingerprints": {"data": "b"}}, "data was a, is b"),
        ({"fingerprints": {"data": "a (elsewhere)"}}, None),
        ({"options": {"beta": 0.1, "metric_for_best_model": "loss"}}, None),
    ],
)
def test_differences_between_a_run_and_its_checkpoint(
    changes: dict[str, Any], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    current = replace(CURRENT, **changes)
    if said is not None:
        with pytest.raises(OptionError, match="^resume_from_checkpoint: checkpoint-4 ") as caught:
            check_same_run(CHECKPOINT, current, anyway=False)
        assert said in str(caught.value)
    check_same_run(CHECKPOINT, current, anyway=True)
    assert capsys.readouterr().out.splitlines() == ([] if said is None else [f"resume_anyway: {said}"])


def test_another_window_is_never_accepted() -> None:
    with pytest.raises(OptionError, match="a step has 9 rows .* had 8; set .*gradient_accumulation_steps"):
        check_same_run(CHECKPOINT, replace(CURRENT, window=9), anyway=True)


def test_what_the_log_says_of_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` and the report read these keys."""
    monkeypatch.setattr(trainer, "restore", lambda *_: None)
    monkeypatch.setattr(trainer, "BestModel", lambda *_: SimpleNamespace(moved_to=lambda folder: None))
    monkeypatch.setattr(trainer.ACTIVITY, "status", None)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(run_state=None, identity=SimpleNamespace(name="r", attempt=3)),
        planned=SimpleNamespace(engines=SimpleNamespace(policy={"zero_optimization": {"stage": 2}})),
        engines=None, args=None, state=None,
        folder=SimpleNamespace(set_newer_aside=lambda step: None),
    )  # fmt: skip
    expected = {"run": "r", "attempt": 3, "checkpoint": "checkpoint-4", "world_size": 1, "stage": 2}
    assert trainer.AlignmentTrainer._restore(run, CHECKPOINT, 9, CURRENT) == expected


# Callbacks and advice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_requests_of_every_rank_count(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's callbacks request a save and a log, and it was asked to stop by the user."""
    events = Events(CPOConfig("out"), TrainerState(), [], None)
    theirs = [0.0, 0.0, 1.0, 0.0, 1.0, float(StopReason.SIGINT)]
    monkeypatch.setattr(callbacks, "world_size", lambda: ranks)
    monkeypatch.setattr(
        callbacks, "largest_numbers", lambda own: [max(pair) for pair in zip(own, theirs, strict=True)]
    )
    events.control.should_evaluate = True
    REQUESTS.request(StopReason.SIGTERM)
    try:
        found = events.decide()
    finally:
        REQUESTS.forget()
    if ranks == 1:
        assert found == Decision(evaluate=True, leave=StopReason.SIGTERM)
    else:
        assert found == Decision(save=True, evaluate=True, log=True, leave=StopReason.SIGINT)
        assert events.control.should_save and events.control.should_log and not events.control.should_epoch_stop
    assert events.decide().leave == (None if ranks == 1 else StopReason.SIGINT)


@pytest.mark.parametrize(
    ("rate", "adapters", "inside"),
    [(5e-7, False, True), (4.9e-7, False, False), (5e-6, False, True), (5.1e-6, False, False), (5e-6, True, True),
     (4.9e-6, True, False), (5e-5, True, True), (5.1e-5, True, False)],
)  # fmt: skip
def test_learning_rates_of_models_and_adapters(rate: float, adapters: bool, inside: bool) -> None:
    said = about_learning_rate(KTOConfig("out", learning_rate=rate), 0.1, adapters=adapters)
    assert (said == []) == inside
    assert inside or ("5e-06 to 5e-05" if adapters else "5e-07 to 5e-06") in said[0]


# Files and pages -----------------------------------------------------------------------------------------------------


def test_a_card_has_no_empty_sections() -> None:
    known = dict.fromkeys(("base_model", "base_id", "method_title"))
    names = ("papers", "datasets", "export", "training", "data")
    card = ModelCard(
        title="T", is_classifier=False, method="kto", results_of="", train={}, evaluation={}, versions={}, options={},
        **known, **{name: [] for name in names},
    )  # fmt: skip
    lines = [line for line in card.text().splitlines() if line]
    pairs = itertools.pairwise(lines)
    assert not [one for one, other in pairs if one.startswith("## ") and other.startswith("## ")]
    assert "## Versions" not in lines and "## Versions" in replace(card, versions={"torch": "2"}).text()
