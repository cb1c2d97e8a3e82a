"""What is compared: the methods with their rows and floors, and one measurement as a job for a process."""

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
    """What is required: at most this share of TRL's memory, at least this many times its speed."""

    memory: float
    speed: float


@dataclass(frozen=True)
class Setting:
    """How both sides run.

    Attributes:
        stage: ZeRO stage: 0 is plain TRL and our stage 0; 2 is the same DeepSpeed file on both sides.
        checkpointing: recompute activations, both sides' default. TRL generates without a KV cache then.
        lora: train adapters (:data:`LORA_SETTINGS`) on a frozen base, which is the reference as well.
        in_4bit: keep that base in 4 bits (:data:`QUANTIZATION`).
    """

    stage: int = 0
    checkpointing: bool = True
    lora: bool = False
    in_4bit: bool = False

    @property
    def title(self) -> str:
        """For the table."""
        engine = f"ZeRO-{self.stage} on both" if self.stage else "stage 0, plain TRL"
        engine = f"{'QLoRA' if self.in_4bit else 'LoRA'}, {engine}" if self.lora else engine
        return engine if self.checkpointing else f"{engine}; no checkpointing"


PLAIN, ZERO2, UNCHECKPOINTED = Setting(), Setting(stage=2), Setting(checkpointing=False)
LORA, LORA_UNCHECKPOINTED = Setting(lora=True), Setting(lora=True, checkpointing=False)
# PEFT's settings on both sides. Without dropout, and with B = 0 at the start, the first step's metrics are the base's.
LORA_SETTINGS = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
# bitsandbytes' settings on both sides, beside the compute dtype: NF4 with its constants quantised as well.
QUANTIZATION = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: Mapping[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Method:
    """One method to compare.

    Attributes:
        rows: makes the rows of a shape.
        batch: rows of one step.
        floors: what is required in which setting; in a setting with None nothing is.
        same: metrics of the first step that both sides define alike; they show that both saw the same token ids.
        frozen: models of the policy's size beside it whose weights every trainer needs and memory leaves out; with
            adapters one fewer, because the reference is the policy's base.
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
    # Completions are sampled, so the tokens of the two sides differ; at the first step policy and reference agree,
    # whatever the tokens.
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
    """One run of one side, in a process of its own.

    Attributes:
        side: ours or TRL's.
        method: a name of :data:`METHODS`.
        stage, checkpointing, lora, in_4bit: as of :class:`Setting`.
        model: folder of the model and its tokenizer.
        reward_model: folder of a sequence classifier and its tokenizer.
        rows: JSONL file of the rows, for TRL in the order in which ours takes them.
        output: an empty folder for the trainer.
        steps: optimizer steps in all.
        warm_up: how many of them are not measured.
        batch: rows of a step; None: the method's.
        max_length: of a sequence, in tokens, with no limit to the prompt alone; None: each side's defaults.
        gpu: train on the GPU.
        limit: bytes of its memory that the process may allocate.
        precision: what is computed in; master weights are fp32.
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
        """How both sides run."""
        return Setting(self.stage, self.checkpointing, self.lora, self.in_4bit)

    @property
    def rows_of_a_step(self) -> int:
        """Rows of one step."""
        return self.batch or METHODS[self.method].batch

    @property
    def quantization(self) -> dict[str, Any]:
        """bitsandbytes' settings for the base of QLoRA."""
        return {**QUANTIZATION, "bnb_4bit_compute_dtype": DTYPES[self.precision]}

    @property
    def frozen(self) -> int:
        """Models beside the policy whose weights memory leaves out."""
        return max(0, METHODS[self.method].frozen - self.lora)

    def options(self) -> dict[str, Any]:
        """The options that both sides take by the same name; all that are not named keep each side's default."""
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
        """The rows as both trainers are given them."""
        return [json.loads(line) for line in Path(self.rows).read_text(encoding="utf-8").splitlines()]

    @classmethod
    def read(cls, path: str) -> Job:
        """A job from the JSON file of its fields."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
