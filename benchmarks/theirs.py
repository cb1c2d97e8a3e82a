"""TRL's side of a comparison, as in its documentation: a configuration, a trainer, ``train()``.

These settings were aligned because the defaults differ (:meth:`benchmarks.jobs.Job.options` lists all):

- ``bf16=False``: TRL computes in bf16 by default, our side in fp32 on a CPU.
- ``optim="adamw_torch_fused"``: transformers' ``adamw_torch`` is the unfused one, ours is fused.
- ``gradient_checkpointing`` is on by default on both sides; ``use_reentrant`` is set to False on both.
- ``train_sampling_strategy="sequential"`` (KTO's default): the file has the rows in the order in which our side
  uses them, so that step n trains on the same rows on both sides. KTO's mismatched completions still differ: TRL
  rotates them by one within the batch, ours are drawn at random; the completions are the same, the prompts differ.
- Online DPO: TRL generates without a KV cache if gradient checkpointing is on, which is its default; the other row
  turns checkpointing off on both sides, and thus the cache on.
- With ``--lora``, both sides use the same ``LoraConfig`` without dropout and without a reference model: on both
  sides, the reference is the base model with adapters disabled.
- With ``--gpu``, both compute in bf16, or in fp16 if the GPU does not support bf16. Full fine-tuning has fp32 master
  weights on both sides; the base model of adapters is in the compute dtype, or in 4 bits with the same settings.
  Neither side truncates prompts. Online DPO's rewards come from a Python function that costs nothing.
- The first step is logged, nothing is saved or reported, and progress bars are off.

KTO's head on a CPU: without Triton, TRL 1.16 also scores the positions of prompts and padding; on a GPU it does not.
The ratios of the CPU comparison only apply to CPUs.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # CPO is in trl.experimental, which warns on import

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import BitsAndBytesConfig, Trainer  # noqa: E402
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer  # noqa: E402

from benchmarks.jobs import DTYPES, LORA_SETTINGS, Job  # noqa: E402
from benchmarks.measure import arbitrary  # noqa: E402
from benchmarks.processes import ROOT  # noqa: E402
from benchmarks.shapes import load_tokenizer  # noqa: E402

_TRAINERS: dict[str, tuple[type[Any], type[Trainer]]] = {
    "kto": (KTOConfig, KTOTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer),
}


def build(job: Job, rows: Dataset) -> Trainer:
    """Return the trainer of a job; TRL loads the models here."""
    config, trainer = _TRAINERS[job.method]
    options: dict[str, Any] = {**job.options(), "train_sampling_strategy": "sequential"}
    more: dict[str, Any] = {}
    if job.reward_model:
        more = {"reward_funcs": job.reward_model, "reward_processing_classes": load_tokenizer(job.reward_model)}
    if job.stage:
        options["deepspeed"] = str(ROOT / "ds_configs" / f"zero{job.stage}.json")
    if job.method == "online_dpo" and not job.reward_model:
        more["reward_funcs"] = arbitrary
    if job.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(**LORA_SETTINGS)  # type: ignore[arg-type]
        if job.precision != "fp32" or job.in_4bit:
            options["model_init_kwargs"] = {"dtype": DTYPES[job.precision]}  # the base model is in fp32 by default
    if job.in_4bit:
        options["model_init_kwargs"]["quantization_config"] = BitsAndBytesConfig(**job.quantization)
    return trainer(
        model=job.model,
        args=config(**options),
        train_dataset=rows,
        processing_class=load_tokenizer(job.model),
        **more,
    )


def peak_bytes(trainer: Trainer) -> int:
    """Return the maximum GPU memory allocated since the trainer was built, in bytes."""
    return torch.cuda.max_memory_allocated()
