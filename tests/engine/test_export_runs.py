"""Export of checkpoints of real runs: the engine's fp32 master weights are preserved bitwise at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fragment_runs import masters
from support.helpers import STAGES, options, paired_rows, unpaired_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alignment import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from alignment.checkpoint.export import ExportOptions, export

pytestmark = pytest.mark.usefixtures("own_process_group")
TRAINERS: dict[str, tuple[Any, Any, Any]] = {
    "kto": (KTOTrainer, KTOConfig, unpaired_rows(8)),
    "reward": (RewardTrainer, RewardConfig, paired_rows(8)),
}


def checkpoint(kind: str, base: str, folder: Path, **more: Any) -> tuple[Path, dict[str, Tensor]]:
    """The checkpoint after two steps in 16 bits, and the engine's master weights by parameter name."""
    trainer_class, config_class, rows = TRAINERS[kind]
    own = {"learning_rate": 1e-4, "max_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    args = config_class(model_name_or_path=base, **options(folder, **own, **more))
    trainer = trainer_class(args=args, train_dataset=rows)
    trainer.train()
    found = masters(trainer.engines.policy)
    trainer.close()
    return folder / "out" / "checkpoint-2", found


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("kto", "stage2"),
        pytest.param("kto", "stage0", marks=pytest.mark.ci),
        pytest.param("kto", "stage3-offload", marks=pytest.mark.ci),
        pytest.param("reward", "stage3", marks=pytest.mark.ci),
    ],
)
def test_a_16_bit_run_is_exported_from_its_master_weights(kind: str, stage: str, base: str, tmp_path: Path) -> None:
    source, exact = checkpoint(kind, base, tmp_path, deepspeed=STAGES[stage], bf16=True)
    report = export(source, tmp_path / "wide", ExportOptions(dtype="float32", samples=2))
    auto = AutoModelForCausalLM if kind == "kto" else AutoModelForSequenceClassification
    wide, narrow = (dict(auto.from_pretrained(path).named_parameters()) for path in (tmp_path / "wide", source))
    assert wide.keys() == exact.keys() and report.masters == len(exact)
    assert all(torch.equal(wide[name].view(-1), exact[name]) for name in exact)
    assert any(not torch.equal(wide[name], narrow[name].float()) for name in exact)
    assert report.rows == 2 and report.error_max < 1e-6 and "fp32 master weights" in "\n".join(report.lines())
    card = (tmp_path / "wide" / "README.md").read_text()
    assert "- steps: 2\n" in card and f"- ZeRO stage: {stage[5]}\n" in card and "| loss " in card
    assert str(tmp_path) not in card and ("2402.01306" in card) is (kind == "kto")
