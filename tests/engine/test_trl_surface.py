"""Attributes of trainers with real engines before and after training, and training twice."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.helpers import make_classifier, options, paired_rows, train_and_close, unpaired_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from alignment.config.errors import OptionError


class Hears(TrainerCallback):  # type: ignore[misc]
    """Records the arguments and log records that callbacks receive."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.evaluated: list[set[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.given = given

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.evaluated.append(set(metrics))


def copied(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_a_kto_run_as_seen_by_scripts(base: str, tmp_path: Path) -> None:
    """The model is loaded once; one record per set; a second training."""
    rows, heard = unpaired_rows(9), Hears()
    args = KTOConfig(**options(tmp_path, max_steps=2, learning_rate=0.1, lr_scheduler_type="linear"))
    sets = {"a": rows[:3], "b": rows[:2]}
    trainer = KTOTrainer(base, None, args=args, train_dataset=rows, eval_dataset=sets, callbacks=[heard])
    assert trainer.engines.models is None and trainer.optimizer is None and trainer.ref_model is None
    assert trainer.train_dataset.column_names == ["prompt_ids", "completion_ids", "label"]
    assert set(trainer.eval_dataset) == {"a", "b"} and len(trainer.eval_dataset["b"]) == 2
    before = copied(trainer)
    built = trainer.engines.models
    assert built is not None and before.keys() == AutoModelForCausalLM.from_pretrained(base).state_dict().keys()
    trainer.train()
    assert trainer.engines.models is built, "training loaded the model again"
    assert all(not torch.equal(value, trainer.model.get_parameter(name)) for name, value in before.items())
    assert heard.given["optimizer"] is trainer.optimizer and heard.given["lr_scheduler"] is trainer.lr_scheduler
    assert trainer.ref_model is not None and trainer.model_wrapped is built.policy.engine
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    metrics = trainer.evaluate()
    assert [{name.split("_")[1] for name in names} for names in heard.evaluated] == [{"a"}, {"b"}]
    records = [record for record in trainer.state.log_history if any(name.startswith("eval_") for name in record)]
    assert len(records) == 2 and "eval_b_loss" not in records[0] and {"eval_a_loss", "eval_b_loss"} <= set(metrics)
    assert trainer.evaluate("b")["eval_b_loss"] == metrics["eval_b_loss"]
    assert "eval_a_loss" not in trainer.evaluate("b")
    with pytest.raises(OptionError, match=r"^eval_dataset: no set named 'c' \(available: a, b\)$"):
        trainer.evaluate("c")
    assert trainer.is_local_process_zero() and trainer.hub_model_id is None
    trainer.write_report(show=False)
    report = (trainer.output_dir / "report.md").read_text()
    assert "a_loss" in report and "b_loss" in report
    middle, rates = copied(trainer), [r["learning_rate"] for r in trainer.state.log_history if "learning_rate" in r]
    result = trainer.train()
    assert result.global_step == 2 and trainer.engines.models is built
    assert [r["learning_rate"] for r in trainer.state.log_history if "learning_rate" in r] == rates == [0.1, 0.05]
    assert any(not torch.equal(value, trainer.model.get_parameter(name)) for name, value in middle.items())
    logs = [trainer.output_dir / name for name in ("log.jsonl", "previous-1/log.jsonl")]
    names = [json.loads(log.read_text().splitlines()[0])["run"] for log in logs]
    assert names[0] != names[1]
    with pytest.raises(OptionError, match="create a new trainer"):
        train_and_close(trainer, resume_from_checkpoint=True)
    for act in (trainer.train, lambda: trainer.model):
        with pytest.raises(OptionError, match="create a new trainer"):
            act()


def test_accessing_the_model_does_not_affect_training(base: str, tmp_path: Path) -> None:
    """Adapters with dropout on a live model; the model is the PeftModel around it.

    A run whose model was accessed resumes from a checkpoint of one whose model was not.
    """
    found: list[dict[str, torch.Tensor]] = []
    for read in (False, True, True):
        folder = tmp_path / str(len(found))
        more = {"disable_dropout": False, "save_strategy": "steps", "save_steps": 1}
        args = CPOConfig(**options(folder, max_steps=2) | more)
        lora = LoraConfig(r=2, lora_dropout=0.5, task_type="CAUSAL_LM")
        model = AutoModelForCausalLM.from_pretrained(base)
        trainer = CPOTrainer(model, args=args, train_dataset=paired_rows(6), peft_config=lora)
        before = copied(trainer) if read else {}
        trainer.train(str(tmp_path / "0" / "out" / "checkpoint-1") if found[1:] else None)
        assert isinstance(trainer.model, PeftModel) and trainer.model.get_base_model() is model
        for name, value in before.items():
            changed = not torch.equal(value, trainer.model.get_parameter(name))
            assert name.startswith("base_model.model.") and changed == ("lora_" in name), name
        found.append(copied(trainer))
        trainer.close()
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_a_reward_model_predicts_the_rewards_of_each_row(tmp_path: Path, capsys: Any) -> None:
    """A live bf16 model is used in fp32, as in training, even without an engine; its first label is the reward."""
    model = make_classifier(tmp_path / "model", labels=2)
    live, plain = (AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.bfloat16) for _ in range(2))
    rows = paired_rows(7)
    trainer = RewardTrainer(live, args=RewardConfig(**options(tmp_path, max_steps=1)), train_dataset=rows)
    assert trainer.model is live and all(value.dtype == torch.float32 for value in copied(trainer).values())
    assert "the model has 2 labels; only the first is trained and used as the reward" in capsys.readouterr().out
    predicted = trainer.predict(rows)
    assert predicted.predictions.shape == (7, 2) and predicted.label_ids.tolist() == [0] * 7
    better = predicted.predictions[:, 0] > predicted.predictions[:, 1]
    assert predicted.metrics["test_rewards/accuracies"] == pytest.approx(better.mean())
    plain, shown = plain.float(), trainer.train_dataset
    for number in range(7):
        for column, name in enumerate(("chosen_ids", "rejected_ids")):
            with torch.no_grad():
                score = plain(torch.tensor([shown[number][name]])).logits[0, 0].item()
            assert predicted.predictions[number, column] == pytest.approx(score, abs=1e-5)
    trainer.end()
    assert trainer.engines.models is None


def test_live_adapters_are_merged_under_new_ones(base: str, tmp_path: Path, capsys: Any) -> None:
    own = AutoModelForCausalLM.from_pretrained(base)
    live = get_peft_model(own, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False))
    merged = copy.deepcopy(live).merge_and_unload().state_dict()
    args = CPOConfig(**options(tmp_path))
    trainer = CPOTrainer(live, args=args, train_dataset=paired_rows(4), peft_config=LoraConfig(r=4))
    assert "default" in capsys.readouterr().out
    assert trainer.planned.policy.merged and trainer.planned.policy.live is own
    assert all(torch.equal(value, merged[name]) for name, value in own.state_dict().items())
    trainer.close()
