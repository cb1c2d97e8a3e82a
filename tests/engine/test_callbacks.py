"""transformers' callbacks: their events, their requests, and the best checkpoint."""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from helpers import STAGES, make_model, options, paired_rows, unpaired_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, integrations
from transformers.integrations import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from alignment.config.checks import INTEGRATIONS
from alignment.config.errors import OptionError
from tools.ranks import RankServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "policy", "tied", seed=1)


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
    args = CPOConfig(
        **options(tmp_path, num_train_epochs=1, eval_strategy="steps", eval_steps=2, save_strategy="epoch")
    )
    trainer = CPOTrainer(
        model=model, args=args, train_dataset=paired_rows(9), eval_dataset=paired_rows(3), callbacks=[recorder]
    )
    trainer.train()
    trainer.close()
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
    trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(20))
    trainer.train()
    trainer.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == steps
    counts = [entry["count/chosen"] + entry["count/rejected"] for entry in logged]
    assert counts == [4 * (step - before) for step, before in zip(steps, [0, *steps])]
    for entry in logged:
        for name in ("rewards/chosen", "logps/rejected"):
            count = entry[name.replace("rewards", "count").replace("logps", "count")]
            assert entry[f"{name}_sum"] == pytest.approx(entry[name] * count)
    # The last step was not due: the summary repeats it, as in TRL, and does not count as a step's entry.
    summary, step_only = trainer.state.log_history[-1], ("loss", "grad_norm", "learning_rate")
    assert {name: value for name, value in logged[-1].items() if name not in step_only}.items() <= summary.items()
    assert "train_loss" in summary and not any(name in summary for name in step_only)
    line = json.loads((trainer.output_dir / "log.jsonl").read_text().splitlines()[-2])  # the line before the end event
    assert line.pop("time") and line == summary


class Director(TrainerCallback):
    """Makes the requests that a user can make."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = state.global_step == 2
        control.should_evaluate = state.global_step == 3
        control.should_training_stop = state.global_step == 4
        return control


def test_a_callback_can_save_evaluate_and_stop(model: str, tmp_path: Path) -> None:
    args = KTOConfig(**options(tmp_path, num_train_epochs=9))
    trainer = KTOTrainer(
        model=model, args=args, train_dataset=unpaired_rows(20), eval_dataset=unpaired_rows(4), callbacks=[Director]
    )
    output = trainer.train()
    trainer.close()
    assert output.global_step == 4
    assert "rewards/chosen" not in trainer.state.log_history[-1], "everything was logged when due"
    assert [p.name for p in Path(args.output_dir or "").glob("checkpoint-*")] == ["checkpoint-2"]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [3]


class EndsEpochs(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


def test_a_callback_can_end_an_epoch(model: str, tmp_path: Path) -> None:
    """Two windows of each epoch are trained on; after the second, the next epoch starts."""
    args = SFTConfig(**options(tmp_path, max_steps=4))
    rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in unpaired_rows(12)]
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, callbacks=[EndsEpochs()])
    trainer.train()
    trainer.close()
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    assert epochs == pytest.approx([1 / 3, 2 / 3, 4 / 3, 5 / 3])


def test_callbacks_are_added_and_removed(model: str, tmp_path: Path) -> None:
    trainer = KTOTrainer(model=model, args=KTOConfig(**options(tmp_path)), train_dataset=unpaired_rows(4))
    one, two = Recorder(), Director()
    trainer.add_callback(one)
    trainer.add_callback(two)
    assert trainer.pop_callback(Director) is two and trainer.pop_callback(Director) is None
    trainer.remove_callback(Director)
    trainer.remove_callback(one)
    assert [type(callback).__name__ for callback in trainer.events.handler.callbacks] == ["DefaultFlowCallback"]


class Decides(TrainerCallback):
    """Replaces a metric by given values, so that a test knows which evaluation is the best."""

    def __init__(self, values: list[float]) -> None:
        self.values = iter(values)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics["eval_loss"] = next(self.values)


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
def test_the_best_adapters_are_loaded_at_the_end(model: str, tmp_path: Path, stage: str) -> None:
    saving = {"save_strategy": "no", "save_total_limit": 1, "load_best_model_at_end": True}
    given = options(tmp_path, num_train_epochs=1, eval_strategy="steps", eval_steps=1, use_peft=True, **saving)
    args = CPOConfig(**given | {"deepspeed": STAGES[stage], "learning_rate": 1e-2, "lora_r": 2})
    rows = {"train_dataset": paired_rows(16), "eval_dataset": paired_rows(2)}
    trainer = CPOTrainer(model=model, args=args, callbacks=[Decides([5.0, 2.0, 4.0, 3.0])], **rows)
    trainer.train()
    best = trainer.output_dir / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    trainer.save_model(tmp_path / "saved")
    trainer.close()
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (best, tmp_path / "saved"))
    assert expected.keys() == found.keys() and any(bool(tensor.any()) for tensor in expected.values())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("stage", ["stage0", "stage2", "stage3-offload"])
def test_the_best_checkpoint_is_loaded_at_the_end(model: str, tmp_path: Path, stage: str) -> None:
    values = [5.0, 2.0, float("nan"), 4.0, 3.0]
    args = CPOConfig(
        **options(
            tmp_path,
            num_train_epochs=1,
            deepspeed=STAGES[stage],
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            save_total_limit=1,
            load_best_model_at_end=True,
        )
    )
    trainer = CPOTrainer(
        model=model,
        args=args,
        train_dataset=paired_rows(20),
        eval_dataset=paired_rows(2),
        callbacks=[Decides(values)],
    )
    trainer.train()
    state, folder = trainer.state, Path(args.output_dir or "")
    assert (state.best_metric, state.best_global_step) == (2.0, 2)
    assert state.best_model_checkpoint == str(folder / "checkpoint-2")
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == ["checkpoint-2"]
    trainer.save_model(tmp_path / "saved")
    trainer.close()
    best = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(found[name], best[name]) for name in best)
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not torch.equal(start[name], best[name]) for name in best)


def test_the_best_checkpoint_is_kept_longer_than_newer_ones(model: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "load_best_model_at_end": True}
    args = CPOConfig(**options(tmp_path, num_train_epochs=1, eval_strategy="steps", eval_steps=1, **saving))
    decides = [Decides([5.0, 2.0, 4.0, 3.0, 6.0])]
    data = {"train_dataset": paired_rows(20), "eval_dataset": paired_rows(2)}
    trainer = CPOTrainer(model=model, args=args, callbacks=decides, **data)
    trainer.train()
    trainer.close()
    left = sorted(path.name for path in Path(args.output_dir or "").glob("checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-5"]


class OwnControl(TrainerCallback):
    """Returns its own control, as transformers allows."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return copy.copy(control)


def test_every_new_best_is_saved_even_if_a_callback_returns_its_own_control(model: str, tmp_path: Path) -> None:
    args = CPOConfig(
        **options(tmp_path, num_train_epochs=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    )
    rows = {"train_dataset": paired_rows(12), "eval_dataset": paired_rows(2)}
    trainer = CPOTrainer(model=model, args=args, callbacks=[OwnControl, Decides([3.0, 2.0, 1.0])], **rows)
    trainer.train()
    trainer.close()
    assert sorted(p.name[-1] for p in Path(args.output_dir or "").glob("checkpoint-*")) == ["1", "2", "3"]


def test_the_initial_evaluation_has_no_checkpoint(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the best metric here, but the run ends with the best weights that were saved, and reports these."""
    args = CPOConfig(
        **options(
            tmp_path,
            num_train_epochs=1,
            eval_on_start=True,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            learning_rate=0.05,
        )
    )
    rows = {"train_dataset": paired_rows(12), "eval_dataset": paired_rows(2)}
    trainer = CPOTrainer(model=model, args=args, callbacks=[Decides([1.0, 5.0, 4.0, 6.0])], **rows)
    trainer.train()
    assert trainer.state.best_global_step == 2
    trainer.close()
    report = (tmp_path / "out" / "report.md").read_text()
    assert "- weights: of step 2, the best by loss: 4" in report
    entry = [e for e in trainer.state.log_history if e["step"] == 2 and "eval_loss" in e][-1]
    assert f"{entry['eval_nll_loss']:.6g}" in report
    last = [e for e in trainer.state.log_history if e["step"] == 3 and "eval_loss" in e][-1]
    assert f"{last['eval_nll_loss']:.6g}" not in report


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"eval_strategy": "steps"}, "EarlyStoppingCallback requires metric_for_best_model"),
        ({"metric_for_best_model": "loss"}, "EarlyStoppingCallback requires evaluation"),
    ],
)
def test_early_stopping_without_its_requirements(
    model: str, tmp_path: Path, more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"train_dataset": paired_rows(4), "eval_dataset": paired_rows(2)}
    trainer = CPOTrainer(model=model, args=CPOConfig(**options(tmp_path, **more)), **rows)
    trainer.add_callback(EarlyStoppingCallback)
    monkeypatch.setattr(trainer.engines, "build", lambda steps: pytest.fail("must not load a model"))
    with pytest.raises(OptionError, match=said):
        trainer.train()


def test_early_stopping(model: str, tmp_path: Path) -> None:
    args = CPOConfig(
        **options(
            tmp_path,
            num_train_epochs=4,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_rewards/accuracies",
        )
    )
    assert args.greater_is_better is True
    trainer = CPOTrainer(
        model=model,
        args=args,
        train_dataset=paired_rows(8),
        eval_dataset=paired_rows(2),
        # No later evaluation exceeds the first one by more than 1, so the run ends after two more.
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=1.0)],
    )
    output = trainer.train()
    trainer.close()
    assert output.global_step == 3
    assert trainer.state.stateful_callbacks["EarlyStoppingCallback"]["attributes"] == {
        "early_stopping_patience_counter": 2
    }


def test_tensorboard_and_wandb_offline(
    model: str, wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    args = KTOConfig(
        **options(tmp_path, max_steps=2, report_to=["tensorboard", "wandb"], run_name="a run", hub_token=None)
    )
    trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(8))
    assert trainer.pop_callback(TensorBoardCallback) is not None
    trainer.add_callback(TensorBoardCallback)
    trainer.train()
    trainer.close()
    wandb.finish()
    files = list((tmp_path / "out" / "runs").rglob("events.*"))
    assert len(files) == 1
    events = EventAccumulator(str(files[0])).Reload()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(logged)
    assert [event.step for event in events.Scalars("train/rewards/chosen")] == [1, 2]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_missing_login_is_found_before_models_are_loaded(
    model: str, wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    args = KTOConfig(**options(tmp_path, max_steps=1, report_to=["wandb"]))
    trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(8))
    with pytest.raises(wandb.errors.UsageError, match="(?i)api.key"):
        trainer.train()
    assert not trainer.engines.ready and not (tmp_path / "out").exists()
    trainer.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"report_to": "tensorbord"}, "report_to='tensorbord': unknown integration; set one of"),
        ({"report_to": ["wandb", "x"]}, "report_to='x': unknown integration; set one of azure_ml"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True: requires evaluations"),
        ({"greater_is_better": True}, "greater_is_better=True: has no effect without metric_for_best_model"),
    ],
)
def test_refused_options(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        KTOConfig(**options(tmp_path, **given))
    assert said in str(caught.value)


def test_a_metric_that_evaluation_does_not_have(model: str, tmp_path: Path) -> None:
    args = KTOConfig(
        **options(tmp_path, eval_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="rewards/margin")
    )
    with pytest.raises(OptionError, match="has no such metric; did you mean 'rewards/margins'"):
        KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(4), eval_dataset=unpaired_rows(4))
    assert not Path(args.output_dir or "").exists()


def test_integrations_have_transformers_names() -> None:
    assert set(INTEGRATIONS) == set(INTEGRATION_TO_CALLBACK) - {"trackio"}


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations_without_their_package_are_refused_before_loading(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without creating their callbacks, which print a traceback when they are deleted."""
    for function in [each for each in dir(integrations) if each.startswith("is_") and each.endswith("_available")]:
        monkeypatch.setattr(integrations, function, lambda: False)
    made = INTEGRATION_TO_CALLBACK[name]
    theirs = inspect.getsource(made.__init__)  # names the package in its own message
    monkeypatch.setattr(made, "__init__", lambda self: pytest.fail("the callback was created"))
    unread: Any = [{"prompt": 1}]
    args = CPOConfig(**options(tmp_path, report_to=["none", name]))
    with pytest.raises(OptionError, match=f"^report_to='{name}': requires .*, or set report_to to none$") as caught:
        CPOTrainer(model=model, args=args, train_dataset=unread)
    package = re.search("run pip install ([a-z-]+),", str(caught.value))
    assert name == "kubeflow" or (package and package[1] in theirs)
    if name == "mlflow":
        monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
        with pytest.raises(OptionError, match="DISABLE_MLFLOW_INTEGRATION=TRUE disables it"):
            CPOTrainer(model=model, args=args, train_dataset=unread)


def test_an_integration_that_cannot_start_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise KeyError("no\nserver")

    monkeypatch.setattr(TensorBoardCallback, "__init__", fail)
    args = CPOConfig(**options(tmp_path, report_to="tensorboard"))
    with pytest.raises(OptionError, match="^report_to='tensorboard': .*no.*server.*$"):
        CPOTrainer(model=model, args=args, train_dataset=paired_rows(4))


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
