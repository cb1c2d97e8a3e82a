"""The trained models of the demo: what each is trained from, on which rows, with which options.

The start model comes from `SFTTrainer`, every further one from the start model: a further method is one more entry in
``VARIANTS``. They use the package as any user's script would.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from alignment.config.cpo import CPOConfig
from alignment.config.kto import KTOConfig
from alignment.config.sft import SFTConfig
from alignment.demo.rows import Row, World, labelled_rows, paired_rows
from alignment.demo.settings import PreferenceSettings, Settings
from alignment.demo.tokenizer import train_tokenizer
from alignment.trainers.base import AlignmentTrainer
from alignment.trainers.cpo import CPOTrainer
from alignment.trainers.kto import KTOTrainer
from alignment.trainers.sft import SFTTrainer

MAX_LENGTH = 64  # tokens; the longest row of this world has about 45


@dataclass(frozen=True)
class Variant:
    """A model trained from the start model.

    Attributes:
        name: of its folder and its rows' file, and the method's on the command line.
        title: of its row in the table.
        rows: makes its training rows.
        trainer: makes its trainer from the start model's folder, the output folder, the rows, the settings, and
            whether progress is shown.
    """

    name: str
    title: str
    rows: Callable[[World, Settings], list[Row]]
    trainer: Callable[[Path, Path, list[Row], Settings, bool], AlignmentTrainer]


def start_trainer(folder: Path, rows: list[Row], settings: Settings, progress: bool) -> SFTTrainer:
    """The trainer of the start model: a new tokenizer, a random Qwen2-shaped model, supervised training."""
    start, tokenizer = settings.start, train_tokenizer(rows)
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
    set_seed(settings.seed)
    args = SFTConfig(
        **_shared(folder, settings, progress),
        per_device_train_batch_size=start.batch,
        num_train_epochs=start.epochs,
        learning_rate=start.learning_rate,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
    )
    return SFTTrainer(model=Qwen2ForCausalLM(config), args=args, processing_class=tokenizer, train_dataset=rows)


def _kto(start: Path, folder: Path, rows: list[Row], settings: Settings, progress: bool) -> KTOTrainer:
    args = KTOConfig(**_shared(folder, settings, progress), **_preference(settings.kto), ref_placement="replica")
    return KTOTrainer(model=str(start), args=args, train_dataset=rows)


def _cpo(start: Path, folder: Path, rows: list[Row], settings: Settings, progress: bool) -> CPOTrainer:
    args = CPOConfig(**_shared(folder, settings, progress), **_preference(settings.cpo))
    return CPOTrainer(model=str(start), args=args, train_dataset=rows)


VARIANTS = (
    Variant("kto", "after KTO", lambda world, s: labelled_rows(world.training, s.kto.rows, s.seed), _kto),
    Variant("cpo", "after CPO", lambda world, s: paired_rows(world.training, s.cpo.rows, s.seed), _cpo),
)


def train(build: Callable[[], AlignmentTrainer], folder: Path, said: Path) -> float:
    """Train, save the model in ``folder``, release the engines; return the seconds that it took.

    What the trainer prints is appended to ``said``: the demo's own lines are enough on the terminal.
    """
    started = time.monotonic()
    with said.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        trainer = build()
        trainer.train()
        trainer.save_model(folder)
        trainer.close()
    return time.monotonic() - started


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSONL, for the reader and for the command line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _shared(folder: Path, settings: Settings, progress: bool) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_length": MAX_LENGTH,
        "max_prompt_length": None,
        "warmup_ratio": 0.1,
        "seed": settings.seed,
        "bf16": False,
        "gradient_checkpointing": False,
        "deepspeed": "zero0",
        "logging_steps": 5,
        "save_strategy": "no",
        "disable_tqdm": not progress,
    }


def _preference(settings: PreferenceSettings) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": settings.batch,
        "num_train_epochs": 1,
        "learning_rate": settings.learning_rate,
        "beta": settings.beta,
    }
