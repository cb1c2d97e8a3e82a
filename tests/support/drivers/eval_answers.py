"""Pairs of short runs, of which the second one samples at each evaluation; on one or several ranks.

Usage: eval_answers.py FOLDER CASES. CASES is a JSON file with ``[{"name", "method", "args", "lora", "reference"}]``,
FOLDER/model the policy and FOLDER/reference the reference. FOLDER/NAME-plain and FOLDER/NAME are the output folders,
FOLDER/NAME.json has what was logged by both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.helpers import STAGES, options, paired_rows, train_and_close, unpaired_rows
from support.tiny_adapters import lora

import alignment
from alignment.cli.guarded import guarded
from alignment.run.ranks import rank

PROMPTS = 5  # fewer on the second rank


def rows_of(method: str) -> list[dict[str, Any]]:
    """6 rows; the first two have the same prompt."""
    rows = unpaired_rows(6, 3) if method == "KTO" else paired_rows(6, 3)
    rows[1]["prompt"] = rows[0]["prompt"]
    return rows


def train(folder: Path, case: dict[str, Any], samples: bool) -> list[dict[str, Any]]:
    """One run of 2 steps, with evaluations before the first and after each."""
    method, name = case["method"], case["name"] if samples else f"{case['name']}-plain"
    given = options(folder, learning_rate=0.05, max_steps=2, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    given |= {"output_dir": str(folder / name), "optim": "sgd", "gradient_accumulation_steps": 1}
    given |= case["args"] | {"deepspeed": STAGES[case["args"].get("deepspeed", "stage0")]}
    if samples:
        given |= {"generate_during_eval": True, "num_completions_to_log": PROMPTS, "max_new_tokens": 12}
    models = {"model": str(folder / "model")}
    if case.get("reference"):
        models["ref_model"] = str(folder / "reference")
    trainer = getattr(alignment, f"{method}Trainer")(
        **models,
        args=getattr(alignment, f"{method}Config")(**given),
        train_dataset=rows_of(method),
        eval_dataset=rows_of(method),
        peft_config=lora() if case.get("lora") else None,
    )
    train_and_close(trainer, save=True)
    return trainer.state.log_history


def main() -> None:
    folder = Path(sys.argv[1])
    for case in json.loads(Path(sys.argv[2]).read_text()):
        logs = [train(folder, case, samples) for samples in (False, True)]
        if rank() == 0:
            (folder / f"{case['name']}.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(guarded(main))
