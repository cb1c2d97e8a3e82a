"""Packed SFT: loss and gradient against float64, the same results as unpacked, on one rank and on two."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import STAGES, options, train_and_close
from support.oracle.dense import load, token_logps, wide_maths

from alignment import SFTConfig, SFTTrainer
from alignment.config.errors import CheckpointError, OptionError

pytestmark = pytest.mark.ci
DRIVERS = Path(__file__).resolve().parents[1] / "support" / "drivers"
LENGTH = 16


def tokenized(count: int, seed: int, longest: int) -> list[dict[str, list[int]]]:
    """Return rows of random tokens, some without a loss; the first label is used if rows are wrapped."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [draw.randrange(4, 60) for _ in range(draw.randrange(3, longest))]
        rows.append({"input_ids": ids, "labels": [i if draw.random() < 0.7 else -100 for i in ids[:-1]] + ids[-1:]})
    return rows


def cut(rows: list[dict[str, list[int]]], strategy: str) -> list[list[tuple[int, int]]]:
    """Return the sequences that a strategy makes from a few rows, as (id, label), by its definition."""
    pairs = [list(zip(row["input_ids"], row["labels"])) for row in rows]
    if strategy == "wrapped":
        pairs = [[pair for row in pairs for pair in row]]
    if strategy == "bfd":
        return [row[:LENGTH] for row in pairs]
    return [row[start : start + LENGTH] for row in pairs for start in range(0, len(row), LENGTH)]


def expected(model: str, sequences: list[list[tuple[int, int]]]) -> tuple[float, float]:
    """Return loss and gradient norm over all labeled tokens in float64, one sequence at a time."""
    policy, losses = load(model), []
    for sequence in sequences:
        ids = [token for token, _ in sequence]
        kept = [place for place, (_, label) in enumerate(sequence) if place and label != -100]
        if kept:
            logps = token_logps(policy, ids[:1], ids[1:])
            losses.append(-logps[torch.tensor(kept) - 1])
    loss = torch.cat(losses).mean()
    with wide_maths():
        gradients = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
    return float(loss.detach()), float(sum((g**2).sum() for g in gradients)) ** 0.5


def trainer_of(model: str, folder: Path, rows: Any, **more: Any) -> SFTTrainer:
    given = {"max_length": LENGTH, "max_grad_norm": 0.0, "logging_steps": 1, "max_steps": 1, **more}
    return SFTTrainer(model, args=SFTConfig(**options(folder, **given)), train_dataset=rows, eval_dataset=rows[:4])


def test_against_float64(base: str, tmp_path: Path) -> None:
    """One window of all packs, for any split into forward passes; its evaluation, packed or not."""
    rows = tokenized(12, 5, 2 * LENGTH)
    for strategy in ("bfd", "bfd_split", "wrapped"):
        loss, norm = expected(base, cut(rows, strategy))
        for micro, steps in ((16, 1), (3, 6)):
            trainer = trainer_of(
                base, tmp_path / f"{strategy}{micro}", rows, packing=True, packing_strategy=strategy,
                per_device_train_batch_size=micro, gradient_accumulation_steps=steps, deepspeed=STAGES["stage0"],
            )  # fmt: skip
            assert len(trainer.data.train.packs) <= micro * steps
            known = trainer.evaluate()["eval_loss"]
            train_and_close(trainer)
            found = trainer.state.log_history
            found = next(entry for entry in found if "loss" in entry)
            assert found["loss"] == pytest.approx(loss, rel=1e-6)
            assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert known == pytest.approx(expected(base, cut(rows[:4], strategy))[0], rel=1e-6)


def test_packed_training_equals_unpacked_training(base: str, tmp_path: Path) -> None:
    """The same tokens in a window give the same step; evaluation rows can be packed, too."""
    rows = tokenized(9, 7, LENGTH + 1)
    losses = []
    for name, more in {"packed": {"packing": True, "eval_packing": False}, "rows": {"eval_packing": True}}.items():
        trainer = trainer_of(
            base, tmp_path / name, rows, **more, per_device_train_batch_size=9, max_steps=2, learning_rate=0.5,
            optim="sgd", deepspeed=STAGES["stage0"],
        )  # fmt: skip
        assert (trainer.data.train.packs is not None) == (name == "packed")
        assert (next(iter(trainer.data.eval.values())).packs is not None) == (name == "rows")
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        losses[-1].append(trainer.evaluate()["eval_loss"])
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 3
    assert abs(losses[0][0] - losses[0][1]) > 1e-2


def test_two_ranks_and_resuming(base: str, tmp_path: Path, ranks: Any) -> None:
    """Two ranks compute the same packs as one; a resumed run equals an uninterrupted one."""
    rows = tokenized(24, 11, LENGTH + 1)
    given = {
        "max_length": LENGTH, "packing": True, "max_steps": 4, "logging_steps": 1, "save_strategy": "steps",
        "save_steps": 2, "deepspeed": STAGES["stage2"],
    }  # fmt: skip
    folders = {name: tmp_path / name for name in ("one", "two")}
    for folder in folders.values():
        folder.mkdir()
    run = {"name": "run", "trainer": "SFT", "model": base, "train": rows}
    both = [{**run, "args": options(folders["two"], **given, per_device_train_batch_size=2)}]
    (folders["two"] / "runs.json").write_text(json.dumps(both))
    ranks.run(DRIVERS / "runs.py", folders["two"] / "runs.json", nproc=2)
    other = json.loads((folders["two"] / "run.json").read_text())["log"]
    trainer = SFTTrainer(
        base, args=SFTConfig(**options(folders["one"], **given, per_device_train_batch_size=4)), train_dataset=rows
    )
    train_and_close(trainer)
    own = trainer.state.log_history
    assert [e["loss"] for e in own if "loss" in e] == pytest.approx(
        [e["loss"] for e in other if "loss" in e], rel=1e-5
    )
    assert own[0]["num_tokens"] == other[0]["num_tokens"]
    args = SFTConfig(**options(folders["one"], **given, per_device_train_batch_size=4))
    args.resume_from_checkpoint = str(folders["one"] / "out" / "checkpoint-2")
    again = train_and_close(SFTTrainer(base, args=args, train_dataset=rows))
    assert [e["loss"] for e in again.state.log_history if "loss" in e] == [e["loss"] for e in own if "loss" in e]
    changed = SFTConfig(**options(folders["one"], **{**given, "packing": False}, per_device_train_batch_size=4))
    with pytest.raises((CheckpointError, OptionError), match="data was .*packs by bfd"):
        SFTTrainer(base, args=changed, train_dataset=rows).train(resume_from_checkpoint=True)
