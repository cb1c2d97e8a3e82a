"""The grid of ``test_split_grid.py``: all ways to compute one update, reference runs and tolerances."""

from __future__ import annotations

from typing import Any

from support.helpers import STAGES
from support.pairwise import Combination, everything, pairwise
from support.split_runs import RATE, run

FACTORS: dict[str, tuple[Any, ...]] = {
    "method": ("KTO", "CPO", "DPO", "OnlineDPO", "SFT", "Reward"),
    # Stage, offload and ranks are one factor, so that every method is combined with every combination of the three.
    "engine": tuple((stage, ranks) for stage in STAGES for ranks in (1, 2)),
    "dtype": ("fp32", "bf16"),
    "checkpointing": ("unchecked", "checkpointed", "reentrant"),
    "optimizer": ("sgd", "adamw", "adamw_8bit"),
    "micro": ("whole", "half", "single"),
    "rows": ("packed", "padded"),
}
_ROWS = {"whole": 8, "half": 4, "single": 1}  # rows of the micro-batches of all ranks
_PLAIN = {"engine": ("stage0", 1), "dtype": "fp32", "checkpointing": "unchecked", "micro": "whole", "rows": "padded"}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "unchecked": {"gradient_checkpointing": False},
    "checkpointed": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
# Adam divides a gradient by its own magnitude: with a smaller epsilon, rounding would decide the sign of small
# updates.
_ADAM = {"learning_rate": 0.05, "adam_epsilon": 0.02, "weight_decay": 0.1}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd"},
    "adamw": {"optim": "adamw_torch", **_ADAM},
    "adamw_8bit": {"optim": "adamw_8bit", **_ADAM},
}


def allowed(case: Combination) -> bool:
    """Exclude reference runs, which are not compared with themselves."""
    return case != reference_of(case)


def sampled() -> list[Combination]:
    """Return a subset in which every pair of values occurs."""
    return pairwise(FACTORS, allowed)


def part(method: str, engine: tuple[str, int]) -> list[Combination]:
    """Return all cases of one method on one kind of engine."""
    return everything({**FACTORS, "method": (method,), "engine": (engine,)}, allowed)


def name_of(case: Combination) -> str:
    """Return a name for tests and folders."""
    stage, ranks = case["engine"]
    return "-".join([case["method"], stage, str(ranks), *list(case.values())[2:]])


def reference_of(case: Combination) -> Combination:
    """Return the simplest run that must make the same update: one rank, no ZeRO, fp32, one micro-batch."""
    return {**case, **_PLAIN}


def grid_run(case: Combination, models: dict[str, str], folder: str) -> dict[str, Any]:
    """Return the run of a case."""
    stage, ranks = case["engine"]
    micro = max(1, _ROWS[case["micro"]] // ranks)
    options = {
        **CHECKPOINTING[case["checkpointing"]],
        **_OPTIMIZERS[case["optimizer"]],
        "bf16": case["dtype"] == "bf16",
        "pack": case["rows"] == "packed",
    }
    rate = options.pop("learning_rate", RATE[case["method"]])
    steps = 8 // micro // ranks
    return run(name_of(case), case["method"], models, stage, micro, steps, folder=folder, rate=rate, **options)
