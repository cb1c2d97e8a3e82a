"""Engines pack the sequences of a micro-batch into one row if their model supports it, and say so if it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_tokenizers import char_tokenizer
from support.helpers import STAGES, make_model, options, paired_rows
from transformers import AutoModelForCausalLM, FalconConfig

from alignment import CPOTrainer, DPOTrainer, SFTConfig, SFTTrainer
from alignment.config.errors import OptionError
from alignment.engines import scoring
from alignment.training.trainer import AlignmentTrainer


def make_trainer(
    model: str, folder: Path, stage: str = "stage2", cls: Any = CPOTrainer, rows: Any = None, **more: Any
) -> AlignmentTrainer:
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 1, "max_length": 64}
    args = cls.config_class(**options(folder, **sgd, deepspeed=STAGES[stage], **more))
    return cls(model=model, args=args, train_dataset=rows or paired_rows(8))


def shapes(trainer: AlignmentTrainer) -> list[tuple[int, ...]]:
    """Train, and return the shape of the token IDs of each forward pass of the decoder after its checks."""
    found: list[tuple[int, ...]] = []
    trainer.engines.build(1)
    trainer.engines.policy.scorer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    trainer.train()
    trainer.close()
    return found


def test_a_micro_batch_is_one_row_without_the_second_prompt(tmp_path: Path) -> None:
    trainer = make_trainer(make_model(tmp_path / "model"), tmp_path / "out", per_device_train_batch_size=4)
    assert trainer.data.train is not None and trainer.data.sampler is not None
    plan = trainer.data.sampler.plan(0, 0)
    rows = [trainer.data.train.dataset[row] for micro in plan.micro_batches for row in micro[0].rows]
    most = sum(len(row["prompt_ids"] + row["chosen_ids"] + row["rejected_ids"]) for row in rows)
    found = shapes(trainer)
    assert len(found) == len(plan.micro_batches) and all(rows == 1 for rows, _ in found)
    assert most - 2 * len(rows) <= sum(tokens for _, tokens in found) <= most, (
        "completions may begin with equal tokens"
    )


def test_a_pack_is_one_row(tmp_path: Path) -> None:
    """The sequences of SFT's packs, which do not attend to each other."""
    args = SFTConfig(**options(tmp_path / "out", deepspeed=STAGES["stage2"], max_steps=1, packing=True, max_length=64))
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in paired_rows(24)]
    trainer = SFTTrainer(model=make_model(tmp_path / "model"), args=args, train_dataset=rows)
    assert trainer.data.train is not None and trainer.data.train.packs is not None and trainer.data.sampler is not None
    sizes, plan = trainer.data.train.packs.tokens, trainer.data.sampler.plan(0, 0)
    assert shapes(trainer) == [(1, int(sizes[list(micro[0].rows)].sum())) for micro in plan.micro_batches]


@pytest.mark.parametrize("why", ["its own", "another rank's"])
def test_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, why: str) -> None:
    """A rank on which the model can be packed pads sequences if another rank has to."""
    reason = "it is a test" if why == "its own" else None
    monkeypatch.setattr(scoring, "why_not_packed", lambda scorer, device: reason)
    monkeypatch.setattr(scoring, "true_on_every_rank", lambda mine: mine and reason is not None)
    model, said = make_model(tmp_path / "model"), reason or "see the other ranks"
    assert all(rows > 1 for rows, _ in shapes(make_trainer(model, tmp_path / "auto")))
    line = f"pack: LlamaForCausalLM cannot score several sequences in one row: {said}; sequences are padded"
    assert line in capsys.readouterr().out
    with pytest.raises(
        OptionError, match=f"^pack: true: LlamaForCausalLM cannot .*{said}; set pack to auto or false$"
    ):
        make_trainer(model, tmp_path / "true", pack=True).train()


@pytest.mark.parametrize("stage", ["stage0", "stage3"])
def test_a_model_that_fails_the_test_is_padded(tmp_path: Path, capsys: Any, stage: str) -> None:
    """Its forward pass raises an error in the first layer, within ZeRO-3's gathered weights."""
    tokenizer = char_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    losses = []
    for pack in ("auto", "false"):
        trainer = make_trainer(str(tmp_path / "model"), tmp_path / pack, stage, DPOTrainer, pack=pack)
        trainer.train()
        losses.append(trainer.state.log_history[-2]["loss"])
        trainer.close()
    assert losses[0] == losses[1]
    line = "pack: FalconForCausalLM cannot score several sequences in one row"
    assert capsys.readouterr().out.count(line) == 1, "not once more for the reference, which is the same model"


def test_a_token_budget_that_suffices_only_for_packed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused once the engine is known to pad sequences."""
    rows = [{"prompt": "x" * 40, "chosen": "y" * 10, "rejected": "c"}] * 8
    model, more = make_model(tmp_path / "model"), {"rows": rows, "max_tokens_per_batch": 64}
    assert shapes(make_trainer(model, tmp_path / "packed", **more)) == [(1, 53)] * 4
    monkeypatch.setattr(scoring, "why_not_packed", lambda scorer, device: "it is a test")
    with pytest.raises(OptionError, match="^max_tokens_per_batch=64: .* sequences of up to 51 tokens; .* 102"):
        make_trainer(model, tmp_path / "padded", **more).train()
