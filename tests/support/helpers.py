"""Small models, texts and DeepSpeed settings used by several tests."""

from __future__ import annotations

import contextlib
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CohereConfig,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    TrainerCallback,
)

from support.data_tokenizers import PLAIN, char_tokenizer

POSITIONS = 96


def tiny_config(kind: str, layers: int = 2) -> PretrainedConfig:
    """Return a configuration for the character tokenizer.

    Kinds: ``tied``, ``untied``, ``narrow``, ``odd`` (ranks need padding), ``capped``, ``scaled``, ``moe``.
    """
    common: dict[str, Any] = {
        "vocab_size": len(char_tokenizer()),
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if kind == "narrow":
        return LlamaConfig(**common | {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12})
    if kind == "odd":
        return LlamaConfig(**common | {"hidden_size": 27, "num_attention_heads": 3, "num_key_value_heads": 1,
                                       "head_dim": 14, "intermediate_size": 45}, tie_word_embeddings=True)  # fmt: skip
    if kind == "capped":
        return Gemma2Config(**common, head_dim=8, final_logit_softcapping=2.0, sliding_window=16)
    if kind == "scaled":
        return CohereConfig(**common, logit_scale=0.3)
    if kind == "moe":
        return MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return LlamaConfig(**common, tie_word_embeddings=kind == "tied")


def make_model(
    folder: Path, kind: str = "tied", seed: int = 0, gain: float = 4.0, layers: int = 2, dropout: float = 0.0
) -> str:
    """Save a random model and its tokenizer in Hugging Face format; ``gain`` makes its predictions non-uniform."""
    config = tiny_config(kind, layers)
    config.attention_dropout = dropout
    return save_random(folder, AutoModelForCausalLM, config, seed, gain)


def make_classifier(
    folder: Path, kind: str = "tied", seed: int = 0, labels: int = 1, layers: int = 2, dropout: float = 0.0
) -> str:
    """Save a random model with a score head: a reward model if it has one label."""
    config = tiny_config(kind, layers)
    config.num_labels, config.attention_dropout = labels, dropout
    return save_random(folder, AutoModelForSequenceClassification, config, seed, 4.0)


def save_random(folder: Path, auto: Any, config: PretrainedConfig, seed: int, gain: float) -> str:
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(gain)
    model.save_pretrained(folder)
    char_tokenizer(template=PLAIN).save_pretrained(folder)
    return str(folder)


def text(rng: random.Random, least: int, most: int) -> str:
    """Return random letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(least, most)))


def unpaired_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of different lengths; every second one is desirable."""
    rng = random.Random(seed)
    return [
        {"prompt": text(rng, 2, 12), "completion": text(rng, 2, 30), "label": number % 2 == 0}
        for number in range(count)
    ]


def paired_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs of different lengths."""
    rng = random.Random(seed)
    return [
        {"prompt": text(rng, 2, 12), "chosen": text(rng, 2, 30), "rejected": text(rng, 2, 30)} for _ in range(count)
    ]


def zero(stage: int, *, optimizer: bool = False, parameters: bool = False) -> dict[str, Any]:
    """Return a DeepSpeed configuration that partitions even a tiny model and uses several gradient buckets."""
    section: dict[str, Any] = {"stage": stage}
    if stage:
        section |= {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
    if stage == 3:
        section |= {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 3000}
    if optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if parameters:
        section["offload_param"] = {"device": "cpu", "pin_memory": False}
    return {"zero_optimization": section}


STAGES = {
    "stage0": zero(0),
    "stage2": zero(2),
    "stage3": zero(3),
    "stage2-offload": zero(2, optimizer=True),
    "stage3-offload": zero(3, optimizer=True, parameters=True),
}


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Return options of a short run at stage 0: windows of 4 rows, every step logged, nothing saved."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_length": 64,
        "max_prompt_length": None,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "deepspeed": STAGES["stage0"],
        **more,
    }


def exit_status(command: Callable[..., object], *arguments: Any) -> object:
    """Call a command that exits; return its status."""
    try:
        command(*arguments)
    except SystemExit as leaving:
        return leaving.code
    raise AssertionError("the command did not exit")


def train_and_close(trainer: Any, save: Path | bool = False, **how: Any) -> Any:
    """Train with the arguments ``how``; close the trainer, also after an error, and return it.

    Its model is saved to the folder ``save``, or if it is True, to the output folder.
    """
    with contextlib.closing(trainer):
        trainer.train(**how)
        if save:
            trainer.save_model(None if save is True else save)
    return trainer


class Acts(TrainerCallback):
    """Calls a function at an event of a step."""

    def __init__(self, event: str, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act
        setattr(self, event, self.hear)

    def hear(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called at every event of this name."""
        if state.global_step == self.step:
            self.act()
