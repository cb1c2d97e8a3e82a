"""Adapters in bf16 have fp32 master weights at every ZeRO stage, and updates far below bf16's resolution are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapter_grid import adapter_run
from support.fragment_runs import masters
from support.helpers import Acts
from torch import Tensor

from alignment import CPOConfig, CPOTrainer

RATE = 1e-6

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("kind", "stage", "start"),
    [
        ("dora", "stage0", "continued"),
        ("dora", "stage2", "continued"),
        ("dora", "stage3", "continued"),
        pytest.param("tied", "stage3-offload", "continued", marks=pytest.mark.slow),
        pytest.param("qlora", "stage3", "new", marks=pytest.mark.slow),
    ],
)
def test_master_weights_change_at_a_rate_below_the_resolution_of_bf16(
    bases: dict[str, str], tmp_path: Path, kind: str, stage: str, start: str
) -> None:
    case = {"method": "CPO", "kind": kind, "stage": stage, "ranks": 1, "start": start, "checkpointing": "unchecked"}
    run = adapter_run(case, bases, tmp_path, tmp_path / "starts")
    own = {"bf16": True, "optim": "adamw_torch", "learning_rate": RATE, "adam_epsilon": 1e-12}
    before: dict[str, Tensor] = {}
    begin = Acts("on_train_begin", 0, lambda: before.update(masters(trainer.engines.policy)))
    args = CPOConfig(**(run["args"] | own))
    trainer = CPOTrainer(model=run["model"], args=args, train_dataset=run["train"], callbacks=[begin])
    trainer.train()
    trained = {n: p for n, p in trainer.engines.policy.scorer.model.named_parameters() if p.requires_grad}
    after = masters(trainer.engines.policy)
    try:
        assert {p.dtype for p in trained.values()} == {torch.bfloat16}
        assert {master.dtype for master in after.values()} == {torch.float32}
        kinds = {name.split(".default")[0].rpartition(".")[2] for name in after}
        assert {"lora_A", "lora_B"} <= kinds and ("lora_magnitude_vector" in kinds) == (kind == "dora")
        for name, master in after.items():
            moved = (master - before[name]).abs()
            assert float(moved.max()) <= 4 * RATE, name
            # Adam changes everything with a gradient by up to the learning rate per step, whatever the gradient's size
            assert float(moved.median()) > 0.5 * RATE, name
    finally:
        trainer.close()
