"""What a run would do, printed before any weight is loaded: options, DeepSpeed JSON, rows, lengths, first examples."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from alignment.trainers.base import AlignmentTrainer
    from alignment.trainers.data_setup import PreparedData

_EXAMPLES = 3
_PERCENTILES = (50, 90, 99, 100)


def print_dry_run(trainer: AlignmentTrainer) -> None:
    """Print it on the first rank."""
    if not trainer.is_world_process_zero():
        return
    plan = trainer.engine_plan
    print("options:", trainer.args.to_json_string())
    print("deepspeed:", json.dumps(plan.policy, indent=2))
    if plan.reference is not None:
        print("ref_deepspeed:", json.dumps(plan.reference, indent=2))
    print(plan.describe(trainer.policy_source, trainer.reference_source))
    if trainer.sampler is not None:
        print(f"steps per epoch: {trainer.sampler.steps_per_epoch}, rows per step: {trainer.sampler.window}")
    for data in (trainer.train_data, *trainer.eval_data.values()):
        if data is not None:
            _print_data(trainer, data)


def _print_data(trainer: AlignmentTrainer, data: PreparedData) -> None:
    print(f"{data.where}: {data.report.summary()}")
    columns = {"prompt": data.table.prompt}
    columns |= {name: data.table.completions[:, i] for i, name in enumerate(trainer.method.completions)}
    for name, lengths in columns.items():
        shown = ", ".join(f"p{p} {np.percentile(lengths, p):.0f}" for p in _PERCENTILES)
        print(f"tokens of {name.removesuffix('_ids')}: {shown}")
    decode = trainer.processing_class.decode
    for row in data.dataset.select(range(min(_EXAMPLES, len(data.dataset)))):
        print(f"row {row['row'] + 1}" + (f", label {row['label']}" if "label" in row else ""))
        for name in ("prompt_ids", *trainer.method.completions):
            print(f"  {name.removesuffix('_ids')}: {decode(row[name])!r}")
