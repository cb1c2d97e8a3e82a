"""A batch of unequal rows passes through the model in blocks of similar lengths, without any effect on scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import STAGES, make_model, options, paired_rows, train_and_close
from transformers import AutoModelForCausalLM

from alignment import CPOConfig, CPOTrainer
from alignment.data import batching
from alignment.data.batching import collate, cut_into_blocks
from alignment.models.scorer import CompletionScorer


@pytest.mark.parametrize(
    ("widths", "blocks"),
    [
        ([1], ((1, 1),)),
        ([500] * 4, ((4, 500),)),
        ([500, 500, 100, 100], ((2, 500), (2, 100))),  # saves 800 tokens with one more pass
        ([500, 300], ((2, 500),)),  # would save 200, less than the pass costs
        ([2000, 1000, 990, 300, 100], ((1, 2000), (2, 1000), (2, 300))),
    ],
)
def test_blocks_are_split_if_that_saves_more_than_a_pass_costs(
    widths: list[int], blocks: tuple[tuple[int, int], ...]
) -> None:
    assert cut_into_blocks(widths) == blocks


def test_scores_are_the_same_and_padding_is_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_BLOCK_COST", 1)
    rng = random.Random(0)
    sequences = [(rng.choices(range(50), k=4), rng.choices(range(50), k=length)) for length in (3, 60, 8, 57, 7)]
    batch = collate(sequences, longest=135)
    assert batch.blocks == ((1, 64), (1, 61), (2, 12), (1, 7)), "rows from the longest to the shortest"
    assert batch.targets.tolist() == [token for _, completion in sequences for token in completion]
    scorer = CompletionScorer(AutoModelForCausalLM.from_pretrained(make_model(tmp_path))).eval()
    widths: list[Any] = []
    scorer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    fixed = (batch.inputs, batch.positions, batch.targets, batch.longest)
    whole, cut = scorer(*fixed).scores, scorer(*fixed, blocks=batch.blocks).scores
    assert widths == [(5, 64), (1, 64), (1, 61), (2, 12), (1, 7)]
    assert torch.allclose(whole, cut, atol=1e-5) and whole.std() > 0.1


def test_further_inputs_reach_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of images or of packed rows would, without a change in the engine or the scorer."""
    monkeypatch.setattr(batching, "_BLOCK_COST", 1)
    batch = collate([([1, 2], [3, 4, 5, 6]), ([7], [8])], longest=5)
    scorer = CompletionScorer(AutoModelForCausalLM.from_pretrained(make_model(tmp_path))).eval()
    places = torch.arange(6).expand(2, 6)
    usual, given, other = (
        scorer({**batch.inputs, **more}, batch.positions, batch.targets, 5, blocks=batch.blocks).scores
        for more in ({}, {"position_ids": places}, {"position_ids": places * 0})
    )
    assert len(batch.blocks) == 2 and torch.equal(usual, given)
    assert float((usual - other).abs().max()) > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_zero2_trains_with_either_checkpointing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    """DeepSpeed accepts each weight's gradient once; re-entrant checkpointing would deliver it once per block."""
    model, found = make_model(tmp_path / "model"), []
    for cost in (1, 10**9):
        monkeypatch.setattr(batching, "_BLOCK_COST", cost)
        found.append(trained(model, tmp_path / str(cost), reentrant))
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, value in start.items():
        cut, whole = (one[name] - value for one in found)
        assert whole.norm() > 1e-4 * value.norm() and (cut - whole).norm() <= 1e-5 * whole.norm(), name


def trained(model: str, folder: Path, reentrant: bool) -> dict[str, torch.Tensor]:
    """Return the weights after two steps of SGD."""
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2, "max_length": 96}
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "deepspeed": STAGES["stage2"]}
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    args = CPOConfig(**options(folder, **sgd, **size, **checkpointing))
    trainer = train_and_close(CPOTrainer(model=model, args=args, train_dataset=paired_rows(8)), save=True)
    return AutoModelForCausalLM.from_pretrained(trainer.output_dir).state_dict()
