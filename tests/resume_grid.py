"""Every kind of run that goes on from a checkpoint: the grid of ``test_resume_grid.py``.

A cell is a combination of ``FACTORS``: a run of 7 steps, 3 to an epoch, and the step that it goes on from. Cells that
differ in that step alone share one whole run, which saves at each of them, and at the one after it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from helpers import STAGES, make_classifier, make_model, paired_rows, text, unpaired_rows, zero
from pairwise import Combination, everything, pairwise

STEPS, ROWS, WINDOW = 7, 12, 4
# The first step; an epoch's last one; one inside an epoch. Logs are at 2, 4 and 6, so all are inside an interval.
POINTS = {"first": 1, "epoch": 3, "inside": 5}
FACTORS: dict[str, tuple[Any, ...]] = {
    "method": ("KTO", "CPO", "OnlineDPO", "DPO", "SFT", "Reward", "KTO-lora", "KTO-qlora", "CPO-lora"),
    "stage": ("stage0", "stage1", "stage2", "stage3", "stage2-offload", "stage3-offload"),
    "ranks": (1, 2),
    "optimizer": ("adamw_torch", "adamw_8bit", "deepspeed_cpu_adam", "own"),
    "dtype": ("fp32", "bf16", "fp16"),
    "course": ("counting", "stopped", "best"),
    "point": tuple(POINTS),
}
_ENGINES = {**STAGES, "stage1": zero(1)}
_LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
_METHODS: dict[str, dict[str, Any]] = {
    "OnlineDPO": {
        "max_new_tokens": 6,
        "missing_eos_penalty": 0.5,
        "log_completions": 2,
        "reward_funcs": f"{Path(__file__).parent / 'drivers' / 'canned.py'}:reward",
    },
    "KTO-lora": _LORA,
    "KTO-qlora": {**_LORA, "load_in_4bit": True},
    "CPO-lora": _LORA,
}
# What evaluations lead to. A loss that has to grow by 1e6 never does after the first evaluation: the run ends at step
# 6, with 2 of the 3 evaluations in between counted when it goes on from step 5. The best of those that end by going
# back to it is the greatest loss, so that it is not always the last one.
COURSES: dict[str, dict[str, Any]] = {
    "counting": {"eval_strategy": "epoch", "patience": 5, "threshold": 0.0},
    "stopped": {"eval_strategy": "steps", "eval_steps": 2, "patience": 2, "threshold": 1e6},
    "best": {"eval_strategy": "epoch", "patience": 5, "threshold": 0.0, "load_best_model_at_end": True},
}


def allowed(case: Combination) -> bool:
    """What the project refuses is left out, and adapters at stages where nothing about a resume is new."""
    adapters = "lora" in case["method"]
    if case["optimizer"] == "own" and adapters:
        return False  # new adapters do not exist before the run, so no optimizer can be over them
    return case["method"] != "CPO-lora" or case["stage"].startswith("stage3")


def quick(case: Combination) -> bool:
    """Those that need no compiler."""
    return allowed(case) and case["optimizer"] != "deepspeed_cpu_adam"


def sampled() -> list[Combination]:
    """A subset in which every pair of values meets."""
    return pairwise(FACTORS, quick)


def part(method: str, stage: str, ranks: int) -> list[Combination]:
    """Everything of one method on one kind of engine, with each course in turn."""
    factors = {**FACTORS, "method": (method,), "stage": (stage,), "ranks": (ranks,), "course": ("",), "point": ("",)}
    courses, shift = list(COURSES), FACTORS["stage"].index(stage) + ranks
    found = []
    for place, case in enumerate(everything(factors, allowed)):
        # Every optimizer meets another course with each dtype.
        course = courses[(place + place // len(courses) + shift) % len(courses)]
        found += [{**case, "course": course, "point": point} for point in POINTS]
    return found


def name_of(case: Combination) -> str:
    """A name for tests and folders."""
    return "-".join(map(str, case.values()))


def whole_of(case: Combination) -> str:
    """The name of the whole run of a cell."""
    return name_of({name: value for name, value in case.items() if name != "point"})


def make_models(folder: Path) -> dict[str, str]:
    """A model and a classifier with dropout."""
    made = {
        "model": make_model(folder / "model", "untied", seed=1, layers=1),
        "classifier": make_classifier(folder / "classifier", "untied", seed=1, layers=1),
    }
    for path in made.values():
        config = Path(path) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
    return made


def runs_of(cases: list[Combination], models: dict[str, str]) -> list[dict[str, Any]]:
    """The runs of cells as ``drivers/resume_runs.py`` takes them, with the steps that each goes on from."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        run = found.setdefault(whole_of(case), _run(case, models))
        run["points"].append(POINTS[case["point"]])
    return list(found.values())


def _run(case: Combination, models: dict[str, str]) -> dict[str, Any]:
    method, _, _ = case["method"].partition("-")
    course = dict(COURSES[case["course"]])
    engine, own = dict(_ENGINES[case["stage"]]), case["optimizer"] == "own"
    if case["dtype"] == "fp16":
        engine["fp16"] = {"initial_scale_power": 10, "loss_scale_window": 2}
    stopping = {name: course.pop(name) for name in ("patience", "threshold")}
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": WINDOW // 2 // case["ranks"],
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "optim": "adamw_torch" if own else case["optimizer"],
        "bf16": case["dtype"] == "bf16",
        "fp16": case["dtype"] == "fp16",
        "deepspeed": engine,
        "disable_dropout": False,
        # A buffer that training writes into would be written into twice.
        "gradient_checkpointing": not own,
        "max_length": 64,
        **({} if method == "OnlineDPO" else {"max_prompt_length": None}),
        "logging_steps": 2,
        "include_num_input_tokens_seen": True,
        "include_tokens_per_second": True,
        "save_strategy": "no",  # but where the driver's callback asks
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "disable_tqdm": True,
        **course,
        **_METHODS.get(case["method"], {}),
    }
    return {
        "name": whole_of(case),
        "method": method,
        "model": models["classifier" if method == "Reward" else "model"],
        "own": own,
        "stopping": stopping,
        "args": args,
        "train": _rows(method, ROWS, 3),
        "eval": _rows(method, 5, 4),
        "points": [],
    }


def _rows(method: str, count: int, seed: int) -> list[dict[str, Any]]:
    if method == "OnlineDPO":
        rng = random.Random(seed)
        return [{"prompt": text(rng, 2, 12)} for _ in range(count)]
    return (unpaired_rows if method in ("KTO", "SFT") else paired_rows)(count, seed)
