"""Values derived from options and rows: steps, warm-up, learning rates, and intervals of logging and saving.

Each value is compared with that of transformers' ``Trainer`` and of accelerate's sharding of batches.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainingArguments, get_scheduler

from alignment import CPOConfig
from alignment.config.errors import DataError, OptionError
from alignment.data.windows import RowTable, WindowSampler
from alignment.engines.optimizers import build_scheduler
from alignment.training.data import _rows_of_stream, order_seed, total_steps, window_sampler

LENGTHS: list[dict[str, Any]] = [
    {},
    {"num_train_epochs": 1.0},
    {"num_train_epochs": 0.3},
    {"num_train_epochs": 2.5},
    {"max_steps": 1},
    {"max_steps": 17},
]


def sampler_of(rows: int, batch: int, accumulation: int, ranks: int, *, drop_last: bool) -> WindowSampler:
    table = RowTable(np.full(rows, 3), np.full((rows, 1), 2))
    sizes = {"world_size": ranks, "batch_size": batch, "accumulation": accumulation}
    return WindowSampler(table, **sizes, seed=0, drop_last=drop_last)


def theirs_of(args: TrainingArguments, rows: int, ranks: int) -> tuple[int, int]:
    """Return transformers' optimizer steps per epoch and in total, with batches that accelerate shards over ranks."""
    batches = BatchSampler(range(rows), args.per_device_train_batch_size, args.dataloader_drop_last)
    shard = BatchSamplerShard(batches, num_processes=ranks, process_index=0)
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 1, get_sp_size=lambda: 1, num_examples=lambda loader: rows
    )
    values = Trainer.set_initial_training_values(trainer, args, shard)
    return values[1], values[-1]


def test_step_counts_match_transformers(tmp_path: Path) -> None:
    lengths = [(CPOConfig("out", **more), TrainingArguments(str(tmp_path), use_cpu=True, **more)) for more in LENGTHS]
    for rows, batch, accumulation, ranks in itertools.product((1, 7, 24, 97), (1, 3), (1, 2, 3), (1, 2, 4)):
        sampler = sampler_of(rows, batch, accumulation, ranks, drop_last=False)
        for options, args in lengths:
            args.per_device_train_batch_size, args.gradient_accumulation_steps = batch, accumulation
            found = sampler.steps_per_epoch, total_steps(options, sampler)
            assert found == theirs_of(args, rows, ranks), (rows, batch, accumulation, ranks, options.num_train_epochs)


@pytest.mark.parametrize(("rows", "accumulation", "ours", "theirs"), [(24, 2, 3, 3), (25, 2, 3, 3), (28, 2, 3, 4)])
def test_drop_last_drops_a_window(tmp_path: Path, rows: int, accumulation: int, ours: int, theirs: int) -> None:
    """transformers drops an incomplete micro-batch and takes a step with an incomplete accumulation."""
    sizes: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    args = TrainingArguments(str(tmp_path), use_cpu=True, dataloader_drop_last=True, **sizes)
    assert theirs_of(args, rows, 2)[0] == theirs
    assert sampler_of(rows, 2, accumulation, 2, drop_last=True).steps_per_epoch == ours


SCHEDULES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "cosine"},
    {"lr_scheduler_type": "constant_with_warmup"},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {"lr_scheduler_type": "inverse_sqrt"},
]


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("steps", [1, 11, 15, 100])
def test_learning_rates_match_transformers(tmp_path: Path, steps: int) -> None:
    # A polynomial schedule that is all warm-up divides by zero in transformers.
    kinds = [kind for kind in SCHEDULES if steps > 3 or kind["lr_scheduler_type"] != "polynomial"]
    for kind, warmup in itertools.product(kinds, ({}, {"warmup_ratio": 0.1}, {"warmup_steps": 3})):
        found = []
        for ours in (True, False):
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
            if ours:
                schedule = build_scheduler(optimizer, CPOConfig("out", **kind, **warmup), steps)
            else:
                share = {"warmup_steps": next(iter(warmup.values()), 0)}  # its only name for either
                args = TrainingArguments(str(tmp_path), use_cpu=True, **share)
                schedule = get_scheduler(
                    kind["lr_scheduler_type"],
                    optimizer,
                    num_warmup_steps=args.get_warmup_steps(steps),
                    num_training_steps=steps,
                    scheduler_specific_kwargs=kind.get("lr_scheduler_kwargs", {}),
                )
            found.append(rates(optimizer, schedule, steps))
        assert found[0] == found[1], (kind, warmup)


@pytest.mark.parametrize(
    ("limit", "steps", "rows"),
    [(None, 3, 24), (23, 3, 23), (25, 3, 24), (7, -1, 7), (24, 3, 24)],
)
def test_rows_read_from_a_stream(limit: int | None, steps: int, rows: int) -> None:
    """As many as the run uses."""
    options = CPOConfig("out", max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert _rows_of_stream("train_dataset", limit, options, None) == rows
    assert _rows_of_stream("eval_dataset", limit, options, None) == limit


def test_an_endless_stream_needs_a_limit() -> None:
    with pytest.raises(DataError, match="^train_dataset: .*set max_steps"):
        _rows_of_stream("train_dataset", None, CPOConfig("out"), None)
    packing: Any = object()
    with pytest.raises(OptionError, match="^packing=True: .*set max_train_samples"):
        _rows_of_stream("train_dataset", None, CPOConfig("out", max_steps=3), packing)
    assert _rows_of_stream("train_dataset", 5, CPOConfig("out", max_steps=3), packing) == 5


@pytest.mark.parametrize(("rows", "drop_last", "steps"), [(7, False, 1), (8, True, 1), (15, True, 1), (9, False, 2)])
def test_windows_of_few_rows(rows: int, drop_last: bool, steps: int) -> None:
    options = CPOConfig("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1)
    options.dataloader_drop_last = drop_last
    data: Any = SimpleNamespace(table=RowTable(np.full(rows, 3), np.full((rows, 1), 2)), where="rows", packs=None)
    method: Any = SimpleNamespace(draws_partners=False)
    assert window_sampler(data, method, options).steps_per_epoch == steps
    if drop_last:
        data.table = RowTable(np.full(7, 3), np.full((7, 1), 2))
        with pytest.raises(DataError, match="^rows: the 7 rows do not fill a window of 8"):
            window_sampler(data, method, options)


@pytest.mark.parametrize(("given", "seed"), [({"seed": 3}, 3), ({"seed": 3, "data_seed": 0}, 0)])
def test_the_seed_of_the_order(given: dict[str, int], seed: int) -> None:
    assert order_seed(CPOConfig("out", **given)) == seed
