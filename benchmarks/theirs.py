"""TRL's side of a comparison, as its documentation has it: a configuration, a trainer, ``train()``.

Settings that were made equal because the two sides' defaults differ (:meth:`benchmarks.jobs.Job.options` has all):

- ``bf16=False``: TRL computes in bf16 by default, ours on a CPU in fp32.
- ``optim="adamw_torch_fused"``: what transformers calls ``adamw_torch`` is the plain one, ours is the fused one.
- ``gradient_checkpointing`` is on by default on both; ``use_reentrant`` is said to be False on both.
- ``train_sampling_strategy="sequential"`` (for KTO the default): the file has the rows in the order that our side
  takes them in, so that step n trains on the same rows on both. KTO's mismatched completions still differ: TRL turns
  them by one place within the batch, ours are drawn; they are the same completions behind other prompts.
- Online DPO: TRL generates without a KV cache wherever checkpointing is on, which is its default; the other row has
  checkpointing off, and so the cache on, on both sides.
- with ``--lora`` both are given the same ``LoraConfig``, without dropout and without a reference model: on both sides
  the reference is the base with the adapters off.
- with ``--gpu`` both compute in bf16, or in fp16 where the card has no bf16. Full training has fp32 master weights on
  both sides; the base under adapters is in the compute dtype, or in 4 bits by the same settings. Neither side shortens
  a prompt. Online DPO's rewards come from a Python function that costs nothing.
- the first step is logged, nothing is saved or reported, and there is no progress bar.

KTO's head on a CPU: without Triton TRL 1.16 scores every position, prompts and padding too; on a GPU it does not. The
ratios of this comparison are those of a CPU.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # CPO lives in trl.experimental, which says so on import

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
    """The trainer of a job; TRL loads the models here."""
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
            options["model_init_kwargs"] = {"dtype": DTYPES[job.precision]}  # the base: fp32 unless it is said
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
    """The most GPU memory that was allocated since the trainer was built, in bytes."""
    return torch.cuda.max_memory_allocated()
