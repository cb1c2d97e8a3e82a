"""What is compared: the methods with their rows and floors, and one measurement as a job for a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.shapes import Shape, paired_rows, unpaired_rows

SideName = Literal["ours", "trl"]


@dataclass(frozen=True)
class Floor:
    """What is required at stage 0: at most this share of TRL's memory, at least this many times its speed."""

    memory: float
    speed: float


@dataclass(frozen=True)
class Method:
    """One method to compare.

    Attributes:
        rows: makes the rows of a shape.
        batch: rows of one step.
        floor: what is required.
        same: metrics of the first step that both sides define alike; they show that both saw the same token ids.
    """

    rows: Callable[[Shape, int, int], list[dict[str, Any]]]
    batch: int
    floor: Floor
    same: tuple[str, ...]


METHODS = {
    "kto": Method(unpaired_rows, 8, Floor(1.0, 1.2), ("loss", "logps/chosen", "logps/rejected")),
    "cpo": Method(paired_rows, 4, Floor(1 / 3, 1.5), ("loss", "logps/chosen", "logps/rejected", "nll_loss")),
}


@dataclass(frozen=True)
class Job:
    """One run of one side, in a process of its own.

    Attributes:
        side: ours or TRL's.
        method: a name of :data:`METHODS`.
        stage: ZeRO stage: 0 is plain TRL and our stage 0; 2 is the same DeepSpeed file on both sides.
        model: folder of the model and its tokenizer.
        rows: JSONL file of the rows, for TRL in the order in which ours takes them.
        output: an empty folder for the trainer.
        steps: optimizer steps in all.
        warm_up: how many of them are not measured.
    """

    side: SideName
    method: str
    stage: int
    model: str
    rows: str
    output: str
    steps: int
    warm_up: int

    def options(self) -> dict[str, Any]:
        """The options that both sides take by the same name; all that are not named keep each side's default."""
        return {
            "output_dir": self.output,
            "max_steps": self.steps,
            "per_device_train_batch_size": METHODS[self.method].batch,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "optim": "adamw_torch_fused",
            "learning_rate": 1e-6,
            "bf16": False,
            "use_cpu": True,
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
