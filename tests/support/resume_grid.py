"""The grid of ``test_resume_grid.py``: all kinds of runs that are resumed from a checkpoint.

A cell is a combination of ``FACTORS``: a run of 7 steps, 3 per epoch, and the step from which it is resumed. Cells
that only differ in that step share one uninterrupted run, which saves at each of these steps and at the next one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.helpers import STAGES, make_classifier, make_model, paired_rows, text, unpaired_rows, zero
from support.pairwise import Combination, everything, pairwise

STEPS, ROWS, WINDOW = 7, 12, 4
# The first step, the last one of an epoch, one inside an epoch. Logs are at 2, 4 and 6, all inside an interval.
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
# Effects of evaluations. For callbacks and the best checkpoint, each evaluation is worse than the one before, and the
# first is the best: with a patience of 2, the run ends at step 6, with one evaluation counted when resumed from step
# 5.
COURSES: dict[str, dict[str, Any]] = {
    "counting": {"eval_strategy": "epoch", "patience": 5},
    "stopped": {"eval_strategy": "steps", "eval_steps": 2, "patience": 2},
    "best": {"eval_strategy": "epoch", "patience": 5, "load_best_model_at_end": True},
}


def allowed(case: Combination) -> bool:
    """Exclude unsupported combinations, and adapters at stages that add nothing to the test."""
    adapters = "lora" in case["method"]
    if case["optimizer"] == "own" and adapters:
        return False  # new adapters do not exist before the run, so no optimizer can be created for them
    return case["method"] != "CPO-lora" or case["stage"].startswith("stage3")


def quick(case: Combination) -> bool:
    """Return the cells that do not need a compiler."""
    return allowed(case) and case["optimizer"] != "deepspeed_cpu_adam"


def sampled() -> list[Combination]:
    """Return a subset in which every pair of values occurs."""
    return pairwise(FACTORS, quick)


def part(method: str, stage: str, ranks: int) -> list[Combination]:
    """Return all cells of one method on one kind of engine, alternating other values."""
    factors = {**FACTORS, "method": (method,), "stage": (stage,), "ranks": (ranks,), "course": ("",), "point": ("",)}
    courses, shift = list(COURSES), FACTORS["stage"].index(stage) + ranks
    found = []
    for place, case in enumerate(everything(factors, allowed)):
        # Every optimizer is combined with another value for each dtype.
        course = courses[(place + place // len(courses) + shift) % len(courses)]
        found += [{**case, "course": course, "point": point} for point in POINTS]
    return found


def name_of(case: Combination) -> str:
    """Return a name for tests and folders."""
    return "-".join(map(str, case.values()))


def whole_of(case: Combination) -> str:
    """Return the name of a cell's uninterrupted run."""
    return name_of({name: value for name, value in case.items() if name != "point"})


def make_models(folder: Path) -> dict[str, str]:
    """Create a model and a classifier with dropout."""
    return {
        "model": make_model(folder / "model", "untied", seed=1, layers=1, dropout=0.1),
        "classifier": make_classifier(folder / "classifier", "untied", seed=1, layers=1, dropout=0.1),
    }


def runs_of(cases: list[Combination], models: dict[str, str]) -> list[dict[str, Any]]:
    """Return the runs of cells for ``drivers/resume_runs.py``, with the steps from which each is resumed."""
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
    patience = course.pop("patience")
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
        # A buffer that training modifies would be modified twice.
        "gradient_checkpointing": not own,
        "max_length": 64,
        **({} if method == "OnlineDPO" else {"max_prompt_length": None}),
        "logging_steps": 2,
        "include_num_input_tokens_seen": True,
        "include_tokens_per_second": True,
        "save_strategy": "no",  # except where the driver's callback requests it
        "metric_for_best_model": "loss",
        "disable_tqdm": True,
        **course,
        **_METHODS.get(case["method"], {}),
    }
    return {
        "name": whole_of(case),
        "method": method,
        "model": models["classifier" if method == "Reward" else "model"],
        "own": own,
        "patience": patience,
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
