"""What is compared: the methods with their rows and requirements, and one measurement as a job for a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.shapes import Shape, paired_rows, prompt_rows, unpaired_rows

SideName = Literal["ours", "trl"]
NEW_TOKENS = 64


@dataclass(frozen=True)
class Floor:
    """Requirements: at most this share of TRL's memory, at least this many times its speed."""

    memory: float
    speed: float


@dataclass(frozen=True)
class Setting:
    """The settings of both sides.

    Attributes:
        stage: ZeRO stage: 0 is plain TRL and our stage 0; 2 is the same DeepSpeed file on both sides.
        checkpointing: gradient checkpointing, the default of both sides. TRL then generates without a KV cache.
        lora: train adapters (:data:`LORA_SETTINGS`) on a frozen base model, which is also the reference.
        in_4bit: quantize the base model to 4 bits (:data:`QUANTIZATION`).
    """

    stage: int = 0
    checkpointing: bool = True
    lora: bool = False
    in_4bit: bool = False

    @property
    def title(self) -> str:
        """The title in the table."""
        engine = f"ZeRO-{self.stage} on both" if self.stage else "stage 0, plain TRL"
        engine = f"{'QLoRA' if self.in_4bit else 'LoRA'}, {engine}" if self.lora else engine
        return engine if self.checkpointing else f"{engine}; no checkpointing"


PLAIN, ZERO2, UNCHECKPOINTED = Setting(), Setting(stage=2), Setting(checkpointing=False)
LORA, LORA_UNCHECKPOINTED = Setting(lora=True), Setting(lora=True, checkpointing=False)
# PEFT's settings on both sides. Without dropout and with B = 0 at the start, the first step's metrics are the base's.
LORA_SETTINGS = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
# bitsandbytes' settings on both sides, in addition to the compute dtype: NF4 with double quantization.
QUANTIZATION = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: Mapping[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Method:
    """A method to compare.

    Attributes:
        rows: creates rows of a shape.
        batch: rows per step.
        floors: requirements by setting; a setting with None has none.
        same: metrics of the first step that both sides define identically; equal values show that the token ids match.
        frozen: frozen models of the policy's size, whose weights every trainer needs and memory excludes; with
            adapters one fewer, because the reference is the policy's base model.
        options: further options of both sides.
    """

    rows: Callable[[Shape, int, int], list[dict[str, Any]]]
    batch: int
    floors: Mapping[Setting, Floor | None]
    same: tuple[str, ...]
    frozen: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "kto": Method(
        unpaired_rows,
        8,
        {PLAIN: Floor(1.0, 1.2), ZERO2: None, LORA: Floor(0.15, 2.2), LORA_UNCHECKPOINTED: Floor(0.15, 2.2)},
        ("loss", "logps/chosen", "logps/rejected"),
    ),
    "cpo": Method(
        paired_rows,
        4,
        {PLAIN: Floor(1 / 3, 1.5), ZERO2: None, LORA: Floor(0.25, 1.7), LORA_UNCHECKPOINTED: Floor(0.25, 1.7)},
        ("loss", "logps/chosen", "logps/rejected", "nll_loss"),
    ),
    "dpo": Method(
        paired_rows,
        4,
        {PLAIN: None, ZERO2: None, LORA: None, LORA_UNCHECKPOINTED: None},
        ("loss", "logps/chosen", "logps/rejected", "rewards/margins"),
    ),
    # Completions are sampled, so the tokens of the two sides differ; in the first step, policy and reference agree for
    # any tokens.
    "online_dpo": Method(
        prompt_rows,
        4,
        {
            PLAIN: Floor(0.5, 2.0),
            UNCHECKPOINTED: Floor(0.5, 1.2),
            LORA: Floor(0.35, 5.0),
            LORA_UNCHECKPOINTED: Floor(0.45, 1.3),
        },
        ("loss", "val/contain_eos_token"),
        frozen=2,
        options={"max_new_tokens": NEW_TOKENS},
    ),
}


@dataclass(frozen=True)
class Job:
    """One run of one side in a separate process.

    Attributes:
        side: ours or TRL's.
        method: a key of :data:`METHODS`.
        stage, checkpointing, lora, in_4bit: see :class:`Setting`.
        model: folder of the model and its tokenizer.
        reward_model: folder of a sequence classifier and its tokenizer.
        rows: JSONL file of the rows; for TRL in the order in which our side uses them.
        output: an empty folder for the trainer.
        steps: total optimizer steps.
        warm_up: number of leading steps that are not measured.
        batch: rows per step; None for the method's default.
        max_length: tokens per sequence, with no separate limit for prompts; None for each side's defaults.
        gpu: train on the GPU.
        limit: maximum bytes of GPU memory that the process may allocate.
        precision: compute precision; master weights are fp32.
    """

    side: SideName
    method: str
    model: str
    rows: str
    output: str
    steps: int
    warm_up: int
    stage: int = 0
    checkpointing: bool = True
    lora: bool = False
    reward_model: str = ""
    in_4bit: bool = False
    batch: int | None = None
    max_length: int | None = None
    gpu: bool = False
    limit: int = 0
    precision: Precision = "fp32"

    @property
    def setting(self) -> Setting:
        """The settings of both sides."""
        return Setting(self.stage, self.checkpointing, self.lora, self.in_4bit)

    @property
    def rows_of_a_step(self) -> int:
        """Rows per step."""
        return self.batch or METHODS[self.method].batch

    @property
    def quantization(self) -> dict[str, Any]:
        """bitsandbytes' settings for the base model of QLoRA."""
        return {**QUANTIZATION, "bnb_4bit_compute_dtype": DTYPES[self.precision]}

    @property
    def frozen(self) -> int:
        """Number of frozen models whose weights memory excludes."""
        return max(0, METHODS[self.method].frozen - self.lora)

    def options(self) -> dict[str, Any]:
        """Return options that both sides have under the same name; all others keep each side's default."""
        return {
            "output_dir": self.output,
            "max_steps": self.steps,
            "per_device_train_batch_size": self.rows_of_a_step,
            **({"max_length": self.max_length} if self.max_length else {}),
            "gradient_checkpointing": self.checkpointing,
            **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if self.checkpointing else {}),
            **METHODS[self.method].options,
            "optim": "adamw_torch_fused",
            "learning_rate": 1e-6,
            "bf16": self.precision == "bf16",
            **({"fp16": True} if self.precision == "fp16" else {}),
            "use_cpu": not self.gpu,
            "logging_first_step": True,
            "disable_tqdm": True,
            "report_to": "none",
            "save_strategy": "no",
        }

    def load_rows(self) -> list[dict[str, Any]]:
        """Return the rows as passed to both trainers."""
        return [json.loads(line) for line in Path(self.rows).read_text(encoding="utf-8").splitlines()]

    @classmethod
    def read(cls, path: str) -> Job:
        """Read a job from a JSON file of its fields."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
