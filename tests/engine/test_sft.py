"""SFT: loss, metrics and gradient norm against a float64 computation with the full matrix, for all splits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import STAGES, make_model, options, train_and_close, unpaired_rows
from support.oracle.dense import load, token_logps, wide_maths
from support.oracle.distributions import distribution_metrics

from alignment import SFTConfig, SFTTrainer

ROWS = [{"prompt": row["prompt"], "completion": row["completion"]} for row in unpaired_rows(8, seed=3)]


def one_step(
    model: str, folder: Path, micro: int, steps: int, rows: Any = ROWS, **more: Any
) -> tuple[SFTTrainer, dict[str, float]]:
    size = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps}
    args = SFTConfig(**options(folder, **size, max_steps=1, max_grad_norm=0.0, **more))
    trainer = train_and_close(SFTTrainer(model=model, args=args, train_dataset=rows))
    return trainer, trainer.state.log_history[0]


@pytest.mark.parametrize("stage", ["stage0", pytest.param("stage2", marks=pytest.mark.ci), "stage3"])
def test_against_float64(tmp_path: Path, stage: str) -> None:
    model = make_model(tmp_path / "model", "untied", seed=1)
    for micro, steps in ((8, 1), (2, 4), (1, 8)):
        trainer, found = one_step(model, tmp_path / f"{micro}", micro, steps, deepspeed=STAGES[stage])
        rows = [trainer.data.train.dataset[number] for number in range(8)]
        policy = load(model)
        logps = torch.cat([token_logps(policy, row["prompt_ids"], row["completion_ids"]) for row in rows])
        loss = -logps.mean()
        with wide_maths():
            gradients = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
        assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert found["grad_norm"] == pytest.approx(float(sum((g**2).sum() for g in gradients)) ** 0.5, rel=1e-4)
        labeled = [row | {"label": number % 2 == 0} for number, row in enumerate(rows)]
        assert found["entropy"] == pytest.approx(distribution_metrics(policy, labeled, 64)["entropy"], rel=1e-5)
        assert found["mean_token_accuracy"] == pytest.approx(accuracy(policy, rows))
        assert found["num_tokens"] == sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)


@torch.no_grad()
def accuracy(policy: Any, rows: list[dict[str, Any]]) -> float:
    """Return the share of completion tokens that are the most likely ones."""
    hits, tokens = 0, 0
    for row in rows:
        ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
        with wide_maths():
            likeliest = policy(input_ids=ids, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1].argmax(-1)
        hits += int((likeliest == ids[0, len(row["prompt_ids"]) :]).sum())
        tokens += len(row["completion_ids"])
    return hits / tokens


@pytest.mark.parametrize("loss_type", [pytest.param("chunked_nll", marks=pytest.mark.ci), "dft"])
def test_only_labeled_tokens_are_trained_on(tmp_path: Path, loss_type: str) -> None:
    model = make_model(tmp_path / "model", "untied", seed=1)
    draw = random.Random(5)
    rows = []
    for length in (9, 4, 12, 7, 5, 15, 3, 8):
        ids = [draw.randrange(4, 60) for _ in range(length)]
        rows.append(
            {"input_ids": ids, "labels": [token if draw.random() < 0.6 else -100 for token in ids[:-1]] + ids[-1:]}
        )
    policy, losses = load(model), []
    for row in rows:
        for place, label in enumerate(row["labels"]):
            if place and label != -100:
                logp = token_logps(policy, row["input_ids"][:place], [label])
                losses.append(-logp * (logp.detach().exp() if loss_type == "dft" else 1))
    loss = torch.cat(losses).mean()
    with wide_maths():
        gradients = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
    for micro, steps in ((8, 1), (1, 8)):
        _, found = one_step(
            model, tmp_path / f"{micro}", micro, steps, rows=rows, loss_type=loss_type, deepspeed=STAGES["stage0"]
        )
        assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert found["grad_norm"] == pytest.approx(float(sum((g**2).sum() for g in gradients)) ** 0.5, rel=1e-4)
