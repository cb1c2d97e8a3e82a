"""The models of the demo in order: the data, trainer and options of each.

The trainers are used as in any user script. ``PREPARED`` are the models that others depend on, ``VARIANTS`` those that
are compared; add an entry to compare another method.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from alignment.methods.cpo import CPOTrainer
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.kto import KTOTrainer
from alignment.methods.kto_options import KTOConfig
from alignment.methods.online_dpo import OnlineDPOTrainer
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.methods.reward import RewardTrainer
from alignment.methods.reward_options import RewardConfig
from alignment.methods.sft import SFTTrainer
from alignment.methods.sft_options import SFTConfig
from alignment.training.trainer import AlignmentTrainer
from examples.demo.data import Row, World, labeled_rows, paired_rows, prompt_rows, start_rows, train_tokenizer
from examples.demo.folder import PreferenceSettings, RewardSettings, Settings
from examples.demo.verdict import LORA_TARGETS, ONLINE_TARGETS, Targets

MAX_LENGTH = 64  # tokens; the longest row has about 45, the longest request 17


@dataclass(frozen=True)
class Job:
    """One model to be trained.

    Attributes:
        demo: folder of the demo; each model's subfolder is named after its stage.
        name: name of the stage.
        rows: training rows.
        settings: settings of the demo.
        progress: whether to show progress bars.
    """

    demo: Path
    name: str
    rows: list[Row]
    settings: Settings
    progress: bool

    @property
    def folder(self) -> Path:
        """The output folder of the model."""
        return self.demo / self.name

    def earlier(self, name: str) -> str:
        """Return the folder of an earlier stage's model."""
        return str(self.demo / name)


@dataclass(frozen=True)
class Stage:
    """A model and how it is trained.

    Attributes:
        name: name of its folder, its rows' file and its settings; except for the initial model, also the method.
        title: its name in the table and in messages.
        about: a short description of its training.
        rows: creates its training rows.
        trainer: creates its trainer.
        targets: what it has to reach, if it is compared.
    """

    name: str
    title: str
    about: str
    rows: Callable[[World, Settings], list[Row]]
    trainer: Callable[[Job], AlignmentTrainer]
    targets: Targets = Targets()


def start_trainer(job: Job) -> SFTTrainer:
    """Return the initial model's trainer: a new tokenizer, a random Qwen2-shaped model, supervised training."""
    start, tokenizer = job.settings.start, train_tokenizer(job.rows)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=start.hidden_size,
        num_hidden_layers=start.layers,
        num_attention_heads=start.heads,
        num_key_value_heads=start.heads // 2,
        intermediate_size=start.intermediate_size,
        max_position_embeddings=2 * MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(job.settings.seed)
    args = SFTConfig(
        completion_only_loss=True,  # no loss on the requests
        **_shared(job),
        per_device_train_batch_size=start.batch,
        num_train_epochs=start.epochs,
        learning_rate=start.learning_rate,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
    )
    return SFTTrainer(model=Qwen2ForCausalLM(config), args=args, processing_class=tokenizer, train_dataset=job.rows)


def reward_trainer(job: Job) -> RewardTrainer:
    """Return the trainer of the reward model, which learns which of two responses is warm."""
    reward = job.settings.reward
    args = RewardConfig(**_shared(job), **_one_pass(reward), center_rewards_coefficient=reward.centring)
    return RewardTrainer(model=job.earlier("start"), args=args, train_dataset=job.rows)


def kto_trainer(job: Job) -> KTOTrainer:
    """Return the KTO trainer."""
    kto = job.settings.kto
    args = KTOConfig(**_shared(job), **_one_pass(kto), beta=kto.beta, ref_placement="replica")
    return KTOTrainer(model=job.earlier("start"), args=args, train_dataset=job.rows)


def kto_lora_trainer(job: Job) -> KTOTrainer:
    """Return the trainer of KTO with adapters: the initial model is frozen, and is also the reference."""
    lora = job.settings.kto_lora
    args = KTOConfig(
        **_shared(job),
        **_one_pass(lora),
        beta=lora.beta,
        use_peft=True,
        lora_r=lora.rank,
        lora_alpha=2 * lora.rank,
        lora_dropout=0.0,
    )
    return KTOTrainer(model=job.earlier("start"), args=args, train_dataset=job.rows)


def cpo_trainer(job: Job) -> CPOTrainer:
    """Return the CPO trainer."""
    cpo = job.settings.cpo
    args = CPOConfig(**_shared(job), **_one_pass(cpo), beta=cpo.beta)
    return CPOTrainer(model=job.earlier("start"), args=args, train_dataset=job.rows)


def online_dpo_trainer(job: Job) -> OnlineDPOTrainer:
    """Return the trainer of Online DPO with the reward model of an earlier stage."""
    settings, online = job.settings, job.settings.online_dpo
    args = OnlineDPOConfig(
        **_shared(job),
        **_one_pass(online),
        beta=online.beta,
        num_generations=online.completions,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        ref_placement="replica",
        reward_placement="replica",
    )
    return OnlineDPOTrainer(
        model=job.earlier("start"), reward_model=job.earlier("reward"), args=args, train_dataset=job.rows
    )


START = Stage(
    "start",
    "before",
    "half of the responses warm and half curt, supervised training from random weights",
    lambda world, s: start_rows(world.training, s.start.rows, s.seed),
    start_trainer,
)
REWARD = Stage(
    "reward",
    "reward model",
    "pairs of a warm and a curt response, starting from the initial model",
    lambda world, s: paired_rows(world.training, s.reward.rows, s.seed),
    reward_trainer,
)
PREPARED = (START, REWARD)  # each trained from the one before it, or from random weights
VARIANTS = (
    Stage(
        "kto",
        "after KTO",
        "labeled responses, starting from the initial model",
        lambda world, s: labeled_rows(world.training, s.kto.rows, s.seed),
        kto_trainer,
    ),
    Stage(
        "kto_lora",
        "after KTO, LoRA",
        "labeled responses, training only adapters on the initial model",
        lambda world, s: labeled_rows(world.training, s.kto_lora.rows, s.seed),
        kto_lora_trainer,
        LORA_TARGETS,
    ),
    Stage(
        "cpo",
        "after CPO",
        "pairs of a warm and a curt response, starting from the initial model",
        lambda world, s: paired_rows(world.training, s.cpo.rows, s.seed),
        cpo_trainer,
    ),
    Stage(
        "online_dpo",
        "after Online DPO",
        "requests only, with sampled responses ranked by the reward model, starting from the initial model",
        lambda world, s: prompt_rows(world.training, s.online_dpo.rows, s.seed),
        online_dpo_trainer,
        ONLINE_TARGETS,
    ),
)


def train(build: Callable[[Job], AlignmentTrainer], job: Job, said: Path) -> float:
    """Train, save the model to the job's folder, release the engines; return the duration in seconds.

    The trainer's output is appended to ``said``, so that the terminal shows only the demo's own lines.
    """
    started = time.monotonic()
    with said.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        trainer = build(job)
        trainer.train()
        trainer.save_model(job.folder)
        trainer.close()
    return time.monotonic() - started


def _shared(job: Job) -> dict[str, Any]:
    return {
        "output_dir": str(job.folder),
        "max_length": MAX_LENGTH,
        "warmup_ratio": 0.1,
        "seed": job.settings.seed,
        "bf16": False,
        "gradient_checkpointing": False,
        "deepspeed": "zero0",
        "logging_steps": 5,
        "save_strategy": "no",
        "disable_tqdm": not job.progress,
    }


def _one_pass(settings: PreferenceSettings | RewardSettings) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": settings.batch,
        "num_train_epochs": 1,
        "learning_rate": settings.learning_rate,
    }
