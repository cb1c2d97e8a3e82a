"""Our side of a comparison. Importing this file imports all dependencies, so that code size is not measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from alignment.methods.cpo import CPOTrainer
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.dpo import DPOTrainer
from alignment.methods.dpo_options import DPOConfig
from alignment.methods.kto import KTOTrainer
from alignment.methods.kto_options import KTOConfig
from alignment.methods.online_dpo import OnlineDPOTrainer
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.training.trainer import AlignmentTrainer
from benchmarks.jobs import LORA_SETTINGS, Job
from benchmarks.measure import arbitrary, peak_of_phases
from benchmarks.shapes import load_tokenizer

_TRAINERS: dict[str, tuple[type[Any], type[AlignmentTrainer]]] = {
    "kto": (KTOConfig, KTOTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer),
}


def build(job: Job, rows: Dataset) -> AlignmentTrainer:
    """Return the trainer of a job; it has not loaded weights yet."""
    config, trainer = _TRAINERS[job.method]
    more: dict[str, Any] = {}
    if job.reward_model:
        more = {"reward_model": job.reward_model, "reward_processing_class": load_tokenizer(job.reward_model)}
    if job.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(**LORA_SETTINGS)  # type: ignore[arg-type]
    if job.method == "online_dpo" and not job.reward_model:
        more["reward_funcs"] = arbitrary
    options = {**job.options(), "deepspeed": f"zero{job.stage}"}
    if job.in_4bit:
        options["model_init_kwargs"] = {"quantization_config": job.quantization}
    return trainer(
        model=job.model,
        args=config(**options),
        train_dataset=rows,
        processing_class=load_tokenizer(job.model),
        **more,
    )


def peak_bytes(trainer: AlignmentTrainer) -> int:
    """Return the maximum GPU memory that training allocated, in bytes."""
    return peak_of_phases(trainer)


def order(trainer: AlignmentTrainer, steps: int) -> list[int]:
    """Return the rows in the order in which the first epoch uses them."""
    assert trainer.data.sampler is not None and trainer.data.train is not None
    taken = [row for step in range(steps) for row in trainer.data.sampler.plan(0, step).micro_batches[0][0].rows]
    return [trainer.data.train.source_row(row) - 1 for row in taken]


if __name__ == "__main__":  # python -m benchmarks.ours JOB.json ORDER.json
    job_file, order_file = sys.argv[1:]
    asked = Job.read(job_file)
    taken_order = order(build(asked, Dataset.from_list(asked.load_rows())), asked.steps)
    Path(order_file).write_text(json.dumps(taken_order), encoding="utf-8")
