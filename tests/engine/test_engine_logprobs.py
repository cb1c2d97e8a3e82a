"""Per-token log-probs and gradients from real engines, stages 0 to 3, against dense float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from support.helpers import make_model, options, paired_rows, unpaired_rows, zero
from support.oracle.dense import load, token_logps
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer
from alignment.data import batching
from alignment.data.batching import collate
from alignment.engines.scoring import PolicyEngine

SEQUENCES = [([0, 5, 9, 11], [3, 40, 8, 8, 21, 1]), ([0, 7], [30, 2, 17]), ([0, 4, 6], [12, 44, 13, 9, 50, 31, 33, 1])]


def policy_engine(model: str, folder: Path, stage: int) -> tuple[CPOTrainer, PolicyEngine]:
    args = CPOConfig(**options(folder, deepspeed=zero(stage)))
    trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(8))
    trainer.engines.build(10)
    policy = trainer.engines.window_pass.models.policy
    assert isinstance(policy, PolicyEngine)
    return trainer, policy


def compare(trainer: CPOTrainer, stage: int, gradients: Any) -> None:
    """Compare the engine's gradients with the expected ones, and close the trainer."""
    for (name, found), gradient in zip(trainer.model.named_parameters(), gradients):  # type: ignore[union-attr]
        whole: Any = safe_get_full_grad(found) if stage else found.grad
        if float(gradient.norm()) == 0:
            assert float(whole.norm()) < 1e-6, name
        else:
            assert float((whole - gradient).norm() / gradient.norm()) <= 1e-5, name
    trainer.close()


@pytest.mark.parametrize("kind", ["tied", "untied", "capped", "scaled"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_logps_and_gradients(tmp_path: Path, kind: str, stage: int) -> None:
    path = make_model(tmp_path / "model", kind, seed=3)
    dense = load(path)
    expected = torch.cat([token_logps(dense, prompt, completion) for prompt, completion in SEQUENCES])
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    gradients = torch.autograd.grad((weights * expected).sum(), list(dense.parameters()))

    trainer, policy = policy_engine(path, tmp_path / "out", stage)
    batch = collate(SEQUENCES, 20)
    output = policy.engine(batch.inputs, batch.positions, batch.targets, batch.longest)
    error = ((output.scores - expected).abs() / expected.abs().clamp(min=1)).detach()
    assert float(error.max()) <= 1e-5
    policy.backward((weights.float() * output.scores).sum(), last=True)
    compare(trainer, stage, gradients)


def clipped(logps: Tensor, old: Tensor, ratio: float = 1.3) -> Tensor:
    """A loss with a ratio for each token, which is not a function of the sums."""
    return -torch.exp(logps - old).clamp(max=ratio).sum() / len(old)


@pytest.mark.parametrize("stage", [0, 3])
def test_token_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    monkeypatch.setattr(batching, "_BLOCK_COST", 1)  # rows and sequences are in different orders
    path = make_model(tmp_path / "model", "untied", seed=3)
    dense = load(path)
    expected = torch.cat([token_logps(dense, prompt, completion) for prompt, completion in SEQUENCES])
    old = expected.detach() - torch.linspace(-1, 0.9, len(expected), dtype=torch.float64)
    gradients = torch.autograd.grad(clipped(expected, old), list(dense.parameters()))
    trainer, policy = policy_engine(path, tmp_path / "out", stage)
    batch, nothing = collate(SEQUENCES, 20), collate([], 20)
    assert len(batch.blocks) > 1

    none = policy.forward(nothing, tokens=True).token_logps
    assert none is not None and none.shape == (0,)
    policy.backward(none.sum(), last=False)
    scores, plain = policy.forward(batch, tokens=True), policy.forward(batch, stats=True)
    assert plain.token_logps is None and scores.entropy is None
    assert scores.token_logps is not None and scores.token_logps.dtype == torch.float32
    sums = torch.zeros(len(SEQUENCES)).index_add(0, batch.segments, scores.token_logps)
    for same in (scores.scores, plain.scores, policy.forward(batch).scores):
        assert torch.equal(same, sums)
    with policy.inference():
        asked = policy.forward(batch, tokens=True).token_logps
    assert asked is not None and torch.equal(asked, scores.token_logps) and not asked.requires_grad
    assert float(((asked - expected.detach()).abs() / expected.detach().abs().clamp(min=1)).max()) <= 1e-5

    policy.backward(clipped(scores.token_logps, old.float()), last=True)
    compare(trainer, stage, gradients)


def test_inference_has_no_dropout(tmp_path: Path) -> None:
    """With dropout enabled, the policy trains with it; reference, inference and evaluations do not use it."""
    path = make_model(tmp_path / "model", "untied", seed=3, dropout=0.5)
    batch = collate(SEQUENCES, 20)
    for disabled in (False, True):
        given = {"disable_dropout": disabled, "pack": not disabled, "deepspeed": zero(2)}
        args = KTOConfig(**options(tmp_path / f"{disabled}", **given))
        trainer = KTOTrainer(model=path, args=args, train_dataset=unpaired_rows(8), eval_dataset=unpaired_rows(4))
        trainer.engines.build(10)
        models = trainer.engines.window_pass.models
        policy, reference = models.policy, models.reference.engine
        torch.manual_seed(0)
        learning = [policy.forward(batch).scores.detach() for _ in range(2)]
        assert torch.equal(*learning) is disabled
        with policy.inference():
            asked = policy.forward(batch).scores
        for _ in range(2):
            assert torch.equal(reference.forward(batch).scores, asked)
        # The policy still equals its reference, so that all rewards are 0; a packed reference shares prompts.
        found = trainer.evaluate()
        for name in ("rewards/chosen", "rewards/rejected", "kl"):
            assert found[f"eval_{name}"] == pytest.approx(0.0, abs=0.0 if disabled else 1e-5)
        assert policy.engine.module.training
        trainer.close()


def test_a_live_16_bit_model_and_its_reference_are_upcast(model: str, tmp_path: Path) -> None:
    """transformers loads a checkpoint in its dtype: bf16 weights in an fp32 run are not an error."""
    live = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    args, tokenizer = KTOConfig(**options(tmp_path, bf16=False, max_steps=1)), AutoTokenizer.from_pretrained(model)
    trainer = KTOTrainer(model=live, args=args, train_dataset=unpaired_rows(4), processing_class=tokenizer)
    trainer.train()
    assert trainer.model is live and live.dtype == torch.float32
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    trainer.close()
