"""transformers' callbacks: their events, their requests, and the best checkpoint."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from safetensors.torch import load_file
from support.helpers import STAGES, options, paired_rows, train_and_close, unpaired_rows
from transformers import EarlyStoppingCallback, TrainerCallback, integrations
from transformers.integrations import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer
from alignment.cli.status import status_lines
from alignment.config.errors import OptionError
from alignment.reporting.run_content import read_content
from alignment.reporting.run_view import read_run
from alignment.training.trainer import AlignmentTrainer
from tools.ranks import RankServer

EVALUATES = {"num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 1}
BEST = {**EVALUATES, "load_best_model_at_end": True}


def made(model: str, folder: Path, callbacks: Any = (), rows: int = 12, **more: Any) -> CPOTrainer:
    """A trainer with ``rows`` pairs for training, four a step, and two for evaluation."""
    args = CPOConfig(**options(folder, **more))
    data = {"train_dataset": paired_rows(rows), "eval_dataset": paired_rows(2)}
    return CPOTrainer(model=model, args=args, callbacks=list(callbacks), **data)


def trained(*given: Any, **more: Any) -> CPOTrainer:
    """The trainer after its run, closed."""
    return train_and_close(made(*given, **more))


def logged(trainer: AlignmentTrainer, name: str) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if name in entry]


def saved(trainer: AlignmentTrainer) -> list[str]:
    return sorted(path.name for path in trainer.output_dir.glob("checkpoint-*"))


class Recorder(TrainerCallback):
    """Records events with their steps, and the arguments of `on_log` and `on_evaluate`."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.models: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append((name, state.global_step))
            self.models.add(type(kwargs["model"]).__name__)
            if name == "on_log":
                self.logs.append(dict(kwargs["logs"]))
                assert kwargs["logs"].items() <= state.log_history[-1].items(), "as in transformers"
            if name == "on_evaluate":
                assert "eval_loss" in kwargs["metrics"]

        return record


def test_events_come_in_transformers_order(model: str, tmp_path: Path) -> None:
    recorder = Recorder()
    trained(model, tmp_path, [recorder], rows=9, **EVALUATES | {"eval_steps": 2, "save_strategy": "epoch"})
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"]
    assert recorder.events == [
        ("on_init_end", 0),
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        *((name, 0) for name in step),
        ("on_step_end", 1),
        ("on_log", 1),
        *((name, 1) for name in step),
        ("on_step_end", 2),
        ("on_log", 2),
        ("on_log", 2),
        ("on_evaluate", 2),
        # The last window has one row: one micro-batch, so there is no substep.
        *((name, 2) for name in step if name != "on_substep_end"),
        ("on_step_end", 3),
        ("on_log", 3),
        ("on_log", 3),
        ("on_evaluate", 3),  # again at the end, as requested by transformers' DefaultFlowCallback
        ("on_epoch_end", 3),
        ("on_save", 3),
        ("on_log", 3),
        ("on_train_end", 3),
    ]
    assert recorder.logs[0]["epoch"] == pytest.approx(1 / 3) and "step" not in recorder.logs[0]
    assert "train_runtime" in recorder.logs[-1]
    assert recorder.models == {"NoneType", "LlamaForCausalLM"}


@pytest.mark.parametrize(("first", "steps"), [(True, [1, 2, 4, 5]), (False, [2, 4, 5])])
def test_logged_steps(model: str, tmp_path: Path, first: bool, steps: list[int]) -> None:
    """Every second step, the last, and optionally the first; a mean covers the steps since the previous line."""
    args = KTOConfig(**options(tmp_path, max_steps=5, logging_steps=2, logging_first_step=first))
    trainer = train_and_close(KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(20)))
    lines = logged(trainer, "loss")
    assert [entry["step"] for entry in lines] == steps
    counts = [entry["count/chosen"] + entry["count/rejected"] for entry in lines]
    assert counts == [4 * (step - before) for step, before in zip(steps, [0, *steps])]
    for entry in lines:
        for name in ("rewards/chosen", "logps/rejected"):
            count = entry[name.replace("rewards", "count").replace("logps", "count")]
            assert entry[f"{name}_sum"] == pytest.approx(entry[name] * count)
    # The last step was not due: the summary repeats it, as in TRL, and does not count as a step's entry.
    summary, step_only = trainer.state.log_history[-1], ("loss", "grad_norm", "learning_rate")
    assert {name: value for name, value in lines[-1].items() if name not in step_only}.items() <= summary.items()
    assert "train_loss" in summary and not any(name in summary for name in step_only)
    line = json.loads((trainer.output_dir / "log.jsonl").read_text().splitlines()[-2])  # the line before the end event
    assert line.pop("time") and line == summary


class Asks(TrainerCallback):
    """Requests what a user can request: an event and a step of the run for each flag."""

    def __init__(self, **flags: int) -> None:
        self.flags = flags

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for flag, step in self.flags.items():
            setattr(control, f"should_{flag}", state.global_step % step == 0)


def test_a_callback_can_save_evaluate_and_stop(model: str, tmp_path: Path) -> None:
    trainer = trained(model, tmp_path, [Asks(save=2, evaluate=3, training_stop=4)], rows=20, num_train_epochs=9)
    assert "rewards/chosen" not in trainer.state.log_history[-1], "everything was logged when due"
    assert (trainer.state.global_step, saved(trainer)) == (4, ["checkpoint-2", "checkpoint-4"])
    assert [entry["step"] for entry in logged(trainer, "eval_loss")] == [3]


class Decides(TrainerCallback):
    """Replaces a metric by given values, so that a test knows which evaluation is the best.

    It returns its own control, as transformers allows.
    """

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> Any:
        metrics["eval_loss"] = next(self.values)
        return copy.copy(control)


STAGED = [("stage2", False), ("stage3-offload", False)]


@pytest.mark.parametrize(
    ("stage", "adapters"),
    [("stage0", False), *(pytest.param(*case, marks=pytest.mark.ci) for case in STAGED), ("stage3", True)],
)
def test_the_best_checkpoint_is_loaded_at_the_end(model: str, tmp_path: Path, stage: str, adapters: bool) -> None:
    given: dict[str, Any] = {"deepspeed": STAGES[stage], "save_total_limit": 1, "learning_rate": 1e-2}
    if adapters:  # onto packed weights, and over a module that is trained as a whole
        given |= {"use_peft": True, "lora_r": 2, "lora_modules_to_save": ["lm_head"], "load_in_4bit": True}
    trainer = made(model, tmp_path, [Decides(5.0, 2.0, float("nan"), 4.0, 3.0)], rows=20, **BEST | given)
    trainer.train()
    state, best = trainer.state, trainer.output_dir / "checkpoint-2"
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (2.0, 2, str(best))
    assert saved(trainer) == ["checkpoint-2"]
    trainer.save_model(tmp_path / "saved")
    trainer.close()
    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    expected, found = (load_file(folder / file) for folder in (best, tmp_path / "saved"))
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    start = {} if adapters else load_file(Path(model) / file)
    assert any(bool((tensor != start.get(name, 0)).any()) for name, tensor in expected.items())


def test_the_best_checkpoint_is_kept_longer_than_newer_ones(model: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = trained(model, tmp_path, [Decides(5.0, 2.0, 4.0, 3.0, 6.0)], rows=20, **BEST | saving)
    assert saved(trainer) == ["checkpoint-2", "checkpoint-5"]


def test_the_initial_evaluation_has_no_checkpoint(model: str, tmp_path: Path) -> None:
    """It has the best metric here, but the run ends with the best weights that were saved, and reports these."""
    given = {**BEST, "eval_on_start": True, "learning_rate": 0.05}
    trainer = trained(model, tmp_path, [Decides(1.0, 5.0, 4.0, 6.0)], **given)
    assert trainer.state.best_global_step == 2
    report = (tmp_path / "out" / "report.md").read_text()
    assert "- Weights: of step 2, the best by loss\n" in report
    nll = [f"{entry['eval_nll_loss']:.5g}" for entry in logged(trainer, "eval_loss")]
    assert nll[2] in report and nll[3] not in report


@pytest.mark.parametrize(
    ("more", "place"),
    [(EVALUATES, "metric_for_best_model"), ({"metric_for_best_model": "loss"}, "eval_strategy")],
)
def test_early_stopping_without_its_requirements(
    model: str, tmp_path: Path, more: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(model, tmp_path, [EarlyStoppingCallback], **more)
    monkeypatch.setattr(trainer.engines, "build", lambda steps: pytest.fail("must not load a model"))
    with pytest.raises(OptionError, match=f"^callbacks: EarlyStoppingCallback .*{place}"):
        trainer.train()


@pytest.mark.parametrize("by_option", [False, True], ids=["callback", "option"])
def test_early_stopping(model: str, tmp_path: Path, by_option: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """No later evaluation exceeds the first one by more than 1, so the run ends after two more, also if resumed."""
    patience = {"early_stopping_patience": 2, "early_stopping_threshold": 1.0}
    given = BEST | {
        "num_train_epochs": 4,
        "metric_for_best_model": "eval_rewards/accuracies",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    given |= patience if by_option else {}
    callbacks = [] if by_option else [EarlyStoppingCallback(**patience)]
    trainer = trained(model, tmp_path, callbacks, **given)
    assert trainer.args.greater_is_better is True and trainer.state.global_step == 3
    kept = trainer.state.stateful_callbacks["EarlyStopping" if by_option else "EarlyStoppingCallback"]
    assert kept["attributes"] == {"early_stopping_patience_counter": 2}
    why = "early stopping, eval_rewards/accuracies has not improved by more than 1 (early_stopping_patience=2)"
    why = f"finished early after step 3 of 12: {why}"
    shown = "\n".join(status_lines(read_run(trainer.output_dir)))
    assert why in capfd.readouterr().out and f"state       {why}\n" in shown
    assert f"weights     of step {trainer.state.best_global_step} (load_best_model_at_end)\n" in shown
    assert read_content(trainer.output_dir).page.note == ("info", "", f"{why[0].upper()}{why[1:]}.")
    again = made(model, tmp_path, callbacks, **given)
    train_and_close(again, resume_from_checkpoint=str(trainer.output_dir / "checkpoint-2"))
    assert again.state.global_step == 3


def test_early_stopping_follows_one_set(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    given = options(
        tmp_path, **EVALUATES, early_stopping_patience=1, metric_for_best_model="b_loss", learning_rate=0.0
    )
    sets = {"a": paired_rows(2), "b": paired_rows(2)}
    trainer = CPOTrainer(model=model, args=CPOConfig(**given), train_dataset=paired_rows(12), eval_dataset=sets)
    train_and_close(trainer)
    assert trainer.state.global_step == 2 and "did not find" not in caplog.text


def test_tensorboard_and_wandb_offline(
    model: str, wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    trainer = made(model, tmp_path, max_steps=2, report_to=["tensorboard", "wandb"], run_name="a run")
    assert trainer.pop_callback(TensorBoardCallback) is not None
    trainer.add_callback(TensorBoardCallback)
    train_and_close(trainer)
    wandb.finish()
    (file,) = (tmp_path / "out" / "runs").rglob("events.*")
    events = EventAccumulator(str(file)).Reload()
    losses = [entry["loss"] for entry in logged(trainer, "loss")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("train/rewards/chosen")] == [1, 2]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_missing_login_is_found_before_models_are_loaded(
    model: str, wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    trainer = made(model, tmp_path, max_steps=1, report_to=["wandb"])
    with pytest.raises(wandb.errors.UsageError, match="(?i)api.key"):
        trainer.train()
    assert not trainer.engines.ready and not (tmp_path / "out").exists()
    trainer.close()


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"report_to": ["wandb", "x"]}, "report_to='x'"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True"),
        ({"greater_is_better": True}, "greater_is_better=True"),
        ({**BEST, "metric_for_best_model": "rewards/margin"}, ".*did you mean 'rewards/margins'"),
    ],
)
def test_refused_options(given: dict[str, Any], place: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^{place}"):
        made(model, tmp_path, **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted({*INTEGRATION_TO_CALLBACK} - {"trackio"}))
def test_integrations_without_their_package_are_refused_before_loading(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without creating their callbacks, which print a traceback when they are deleted."""
    for function in [each for each in dir(integrations) if each.startswith("is_") and each.endswith("_available")]:
        monkeypatch.setattr(integrations, function, lambda: False)
    monkeypatch.setattr(INTEGRATION_TO_CALLBACK[name], "__init__", lambda self: pytest.fail("it was created"))
    with pytest.raises(OptionError, match=f"^report_to='{name}': requires .*, or set report_to to none$"):
        made(model, tmp_path, report_to=["none", name])


def test_an_integration_that_cannot_start_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise KeyError("no\nserver")

    monkeypatch.setattr(TensorBoardCallback, "__init__", fail)
    with pytest.raises(OptionError, match="^report_to='tensorboard': .*no.*server.*$"):
        made(model, tmp_path, report_to="tensorboard")


@pytest.mark.ci
def test_two_ranks_act_as_one(model: str, ranks: RankServer, tmp_path: Path) -> None:
    """A callback's request on one rank, in any event, applies to all; both ranks load the best weights."""
    (tmp_path / "run.json").write_text(json.dumps({"model": model, "out": str(tmp_path / "run")}))
    ranks.run(DRIVERS / "callbacks.py", tmp_path / "run.json")
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert outcome.pop("best") == [{"step": 1, "same_weights": True, "on_both": True}] * 2
    assert outcome == {
        "on_step_end should_training_stop": {"steps": [[2, 0.4]] * 2, "saved": []},
        "on_log should_training_stop": {"steps": [[2, 0.4]] * 2, "saved": []},
        "on_log should_save": {"steps": [[4, 0.8]] * 2, "saved": ["checkpoint-2", "checkpoint-3", "checkpoint-4"]},
        "on_evaluate should_training_stop": {"steps": [[2, 0.4]] * 2, "saved": []},
        "on_save should_training_stop": {"steps": [[2, 0.4]] * 2, "saved": ["checkpoint-2"]},
        "on_epoch_begin should_epoch_stop": {"steps": [[4, 0.8]] * 2, "saved": []},
        # From step 2 on, every step ends an epoch.
        "on_step_end should_epoch_stop": {"steps": [[4, 2.2]] * 2, "saved": []},
    }
