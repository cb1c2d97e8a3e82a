"""Adapters of a reward model whose head is not trained in full: saved and trained models give the same rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.helpers import STAGES, make_classifier, make_model, options, paired_rows
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from alignment import RewardConfig, RewardTrainer
from alignment.checkpoint.export import export
from alignment.config.options_export import ExportOptions

ROWS = paired_rows(4)
HEAD = LoraConfig(r=2, target_modules=["q_proj", "score"])


def trained(model: Any, folder: Path, config: Any = None, **more: Any) -> tuple[Tensor, list[str]]:
    """Return (R, 2) rewards after a short run, and its output."""
    args = RewardConfig(**{**options(folder, learning_rate=0.1, max_steps=2, **more), "output_dir": str(folder)})
    trainer = RewardTrainer(model, args=args, train_dataset=ROWS, peft_config=config)
    trainer.train()
    trainer.save_model()
    found = torch.as_tensor(trainer.predict(ROWS).predictions)
    notes = [] if trainer.planned.engines.adapters is None else list(trainer.planned.engines.adapters.notes)
    trainer.close()
    return found, notes


def answered(model: Any, folder: Path, **more: Any) -> Tensor:
    """Return (R, 2) rewards without training."""
    args = RewardConfig(**options(folder, **more))
    trainer = RewardTrainer(model, args=args, train_dataset=ROWS)
    found = torch.as_tensor(trainer.predict(ROWS).predictions)
    trainer.close()
    return found


def loaded(base: str, adapter: Path) -> Any:
    """Return the base model with another new head and the adapter, as loaded by PEFT."""
    torch.manual_seed(99)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    return PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload().requires_grad_(True)


@pytest.mark.parametrize("stage", ["stage0", pytest.param("stage3", marks=pytest.mark.ci)])
def test_a_new_head_with_an_adapter_is_saved_with_it(stage: str, tmp_path: Path) -> None:
    base, out = make_model(tmp_path / "base"), tmp_path / "out"
    found, notes = trained(base, out, HEAD, deepspeed=STAGES[stage])
    assert "saved with the adapters" in notes[0]
    names = load_file(out / "adapter_model.safetensors").keys()
    assert {n.split("score.")[1] for n in names if "score." in n} == {
        "base_layer.weight", "lora_A.weight", "lora_B.weight",
    }  # fmt: skip
    torch.testing.assert_close(answered(loaded(base, out), tmp_path / "peft"), found, rtol=0, atol=1e-5)
    again = answered(base, tmp_path / "again", adapter_name_or_path=str(out), deepspeed=STAGES[stage], seed=7)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-5)
    export(out, tmp_path / "merged", ExportOptions(dtype="float32", samples=0))
    torch.testing.assert_close(answered(str(tmp_path / "merged"), tmp_path / "m"), found, rtol=0, atol=1e-5)


def test_a_live_model_keeps_a_head_without_adapter(tmp_path: Path) -> None:
    base, out = make_model(tmp_path / "base"), tmp_path / "out"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    head = model.score.weight.detach().clone()
    found, notes = trained(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])), out)
    assert "keeps its random initial" in notes[0]
    assert torch.equal(load_file(out / "adapter_model.safetensors")["base_model.model.score.weight"], head)
    torch.testing.assert_close(answered(loaded(base, out), tmp_path / "peft"), found, rtol=0, atol=1e-5)


@pytest.mark.ci
def test_the_head_of_a_checkpoint_is_unchanged(tmp_path: Path) -> None:
    base, out = make_classifier(tmp_path / "base"), tmp_path / "out"
    found, notes = trained(base, out, LoraConfig(r=2))
    assert "is frozen" in notes[0]
    assert not [name for name in load_file(out / "adapter_model.safetensors") if "score" in name]
    torch.testing.assert_close(answered(loaded(base, out), tmp_path / "peft"), found, rtol=0, atol=1e-5)
    again = answered(base, tmp_path / "again", adapter_name_or_path=str(out))
    torch.testing.assert_close(again, found, rtol=0, atol=1e-5)
