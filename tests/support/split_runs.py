"""The runs of ``test_split_invariance.py``, and the parts that they share with those of ``split_grid.py``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from alignment.data.windows import RowTable, WindowSampler
from alignment.objectives.dpo import LOSSES as DPO_LOSSES
from support.drivers.canned import LONGEST, Kind
from support.helpers import STAGES, paired_rows, text, unpaired_rows

ROWS = 15
RATE = {"KTO": 0.4, "CPO": 0.1, "DPO": 0.2, "SFT": 0.2, "OnlineDPO": 0.2, "Reward": 0.1}
METHOD: dict[str, dict[str, Any]] = {
    "KTO": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "CPO": {"beta": 0.2, "cpo_alpha": 0.8, "label_smoothing": 0.1},
    "DPO": {"beta": 0.3, "label_smoothing": 0.1},
    "SFT": {},
    "Reward": {"center_rewards_coefficient": 0.05},
    "OnlineDPO": {
        "beta": 0.2,
        "max_new_tokens": LONGEST + 1,
        "reward_funcs": f"{Path(__file__).parent / 'drivers' / 'canned.py'}:reward",
    },
}
# The judge has the same preferences as the reward function, so it must select the same pairs.
JUDGED = {"reward_funcs": None, "judge": f"{Path(__file__).parent / 'drivers' / 'canned.py'}:judge"}
JUDGED_STAGES = {1: "stage0", 2: "stage3"}  # by number of ranks
# All losses of DPO in one sum.
SEVERAL = {
    "loss_type": list(DPO_LOSSES),
    "loss_weights": [1 + 0.1 * place for place in range(len(DPO_LOSSES))],
    "discopop_tau": 0.3,
    "rate": 0.005,
}
CLIP = 0.05
CLIPPED_STAGES = {1: ("stage0", "stage2"), 2: ("stage0", "stage2", "stage3")}  # by number of ranks
# Output embeddings of their own, with capped and with scaled logits, and the stages at which they are trained.
HEADS = {"untied": ("stage2", "stage3"), "capped": ("stage3",), "scaled": ("stage0",)}
# The first window of an Online DPO run has an odd number of pairs, so that two ranks cannot have the same number.
FIRST_KINDS = (Kind.IDENTICAL, None, Kind.TIED, None, None, Kind.SOME_UNSCORED)
# One run has windows of 4 prompts: no pair in the first, one in the second, so none for the second rank.
SPARSE_KINDS = (*(Kind.TIED, Kind.IDENTICAL, Kind.UNSCORED, Kind.TIED), *(Kind.TIED, Kind.IDENTICAL, None, Kind.TIED))
# More completions, another loss, a beta for each of two epochs, a penalty that distinguishes identical texts.
RANKED = {"loss_type": "ipo", "num_generations": 3, "beta": [0.5, 0.2], "num_train_epochs": 2}
RANKED |= {"missing_eos_penalty": 0.75}
RANKED_KINDS = (None, Kind.ENDED_APART, None, None, Kind.SOME_UNSCORED)


def order(count: int) -> list[int]:
    """Return the order of the rows in the first epoch."""
    blank = np.ones(count, dtype=np.int64)
    sampler = WindowSampler(RowTable(blank, blank[:, None]), world_size=1, batch_size=8, accumulation=1, seed=42)
    return [int(row) for row in sampler.order(0)]


def prompt_rows(count: int, kinds: tuple[Kind | None, ...], seed: int = 6) -> list[dict[str, Any]]:
    """Return prompts of different lengths; the first ones in training order are of these kinds."""
    rng = random.Random(seed)
    rows = [{"prompt": text(rng, 2, 12)} for _ in range(count)]
    for row, kind in zip(order(count), kinds):
        if kind is not None:
            rows[row]["prompt"] = f"{int(kind)}{rows[row]['prompt']}"
    return rows


def rows_of(method: str) -> list[dict[str, Any]]:
    """Return 15 rows with labels so that the first window has 6 desirable and 2 undesirable ones."""
    if method in ("CPO", "DPO", "Reward"):
        margins = [{"margin": 0.25 * (n % 4)} if method == "Reward" else {} for n in range(ROWS)]
        return [row | margin for row, margin in zip(paired_rows(ROWS, seed=5), margins)]
    if method == "OnlineDPO":
        return prompt_rows(ROWS, FIRST_KINDS)
    rows = unpaired_rows(ROWS, seed=4)
    for place, row in enumerate(order(ROWS)):
        rows[row]["label"] = place < 6 or place >= 11
    return rows


def run(
    name: str,
    method: str,
    models: dict[str, str],
    stage: str,
    micro: int,
    steps: int,
    *,
    folder: str,
    model: str | None = None,
    rate: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a run for ``drivers/runs.py``: two windows, of 8 and 7 rows, with plain SGD.

    Args:
        name: name of the run and its folder.
        method: name of the trainer class without ``Trainer``.
        models: paths by name.
        stage: one of ``helpers.STAGES``.
        micro: rows of a rank's micro-batch.
        steps: number of micro-batches of a rank.
        folder: folder in which the run's folder is created.
        model: name of the model; None for the method's default.
        rate: learning rate; None for the method's default.
        **more: further options.
    """
    # KTO's partners would differ with a precomputed reference; see engine/test_precomputed.py.
    placements = ("replica", "sharded", "offload", *(["precomputed"] if method == "DPO" else []))
    model = model or ("classifier" if method == "Reward" else "tied")
    options = {
        "output_dir": f"{folder}/{name}",
        "optim": "sgd",
        "learning_rate": RATE[method] if rate is None else rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "max_length": 64,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "deepspeed": STAGES[stage],
        **({} if method == "OnlineDPO" else {"max_prompt_length": None}),
        **METHOD[method],
        **more,
    }
    has_reference = method in ("KTO", "DPO", "OnlineDPO")
    if has_reference:
        options["ref_placement"] = placements[(micro + len(stage)) % len(placements)]
        if options["ref_placement"] == "precomputed":
            options["max_length"] += (
                steps * micro
            )  # longer than any row, so that each number of ranks has its own store
    return {
        "name": name,
        "trainer": method,
        "model": models[model],
        "ref_model": models["reference"] if has_reference else None,
        "args": options,
        "train": rows_of(method),
    }


def planned(world: int, models: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """Return all runs of one job."""
    runs = []
    if world == 1:
        runs.append(run("DPO-plain", "DPO", models, "stage0", 8, 1, folder=folder))
        for loss, beta in (("hinge", 0.8), ("ipo", 0.3)):
            more = {"loss_type": loss, "label_smoothing": 0.0, "beta": beta}
            runs.append(run(f"DPO-{loss}", "DPO", models, "stage0", 8, 1, folder=folder, **more))
        runs.append(run("DPO-several", "DPO", models, "stage0", 8, 1, folder=folder, **SEVERAL))
    else:
        runs.append(run("DPO-several-split", "DPO", models, "stage2", 1, 4, folder=folder, **SEVERAL))
    for method in ("KTO", "CPO"):
        if world == 1:
            runs.append(run(f"{method}-plain", method, models, "stage0", 8, 1, folder=folder))
        for stage in CLIPPED_STAGES[world]:
            name = f"{method}-{stage}-{world}-clipped"
            runs.append(run(name, method, models, stage, 2, 4 // world, folder=folder, max_grad_norm=CLIP, rate=5.0))
            # With evaluations: of many rows, and of fewer rows than ranks.
            many = unpaired_rows(21, seed=8) if method == "KTO" else paired_rows(21, seed=8)
            runs[-1] |= {"eval": {"many": many, "one": many[:1]}}
            runs[-1]["args"]["per_device_eval_batch_size"] = 4 // world
        tokens = {"KTO": 64, "CPO": 128}[method]
        name = f"{method}-stage2-{world}-tokens"
        runs.append(run(name, method, models, "stage2", 4, 2 // world, folder=folder, max_tokens_per_batch=tokens))
        name = f"{method}-stage2-{world}-blocks"
        runs.append(run(name, method, models, "stage2", 4, 2 // world, folder=folder, pack=False) | {"block_cost": 1})
    if world == 2:
        for head, stages in HEADS.items():
            for stage in stages:
                rate = 0.2 if head == "scaled" else RATE["CPO"]
                name = f"CPO-{head}-{stage}"
                runs.append(run(name, "CPO", models, stage, 2, 2, folder=folder, model=head, rate=rate))
    return runs + online_runs(world, models, folder)


def online_runs(world: int, models: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """Return the pairs of a window, ranked by a reward function and by a judge, distributed over one and two ranks."""
    runs = []
    if world == 1:
        runs.append(run("OnlineDPO-plain", "OnlineDPO", models, "stage0", 8, 1, folder=folder))
    name = f"OnlineDPO-stage2-{world}-tokens"
    more = {"max_tokens_per_batch": 128}
    runs.append(run(name, "OnlineDPO", models, "stage2", 2, 4 // world, folder=folder, **more))
    stage = {1: "stage0", 2: "stage3"}[world]
    name = f"OnlineDPO-ranked-{stage}-{world}"
    runs.append(run(name, "OnlineDPO", models, stage, 2, 4 // world, folder=folder, rate=0.002, **RANKED))
    runs[-1]["train"] = prompt_rows(8, RANKED_KINDS, seed=8)
    many = prompt_rows(13, (Kind.SOME_UNSCORED, Kind.IDENTICAL, None, None, Kind.UNSCORED), seed=9)
    runs[-1] |= {"eval": {"many": many, "one": many[1:2]}}
    runs[-1]["args"]["per_device_eval_batch_size"] = 4 // world
    # With the 5 pairs of the first window, the second rank's last micro-batch is empty.
    judged = JUDGED_STAGES[world]
    name = f"OnlineDPO-judged-{judged}-{world}"
    runs.append(run(name, "OnlineDPO", models, judged, 2, 4 // world, folder=folder, **JUDGED))
    for stage in {1: ("stage0",), 2: ("stage2", "stage3")}[world]:
        name, schedule = f"OnlineDPO-sparse-{stage}-{world}", "linear"
        runs.append(run(name, "OnlineDPO", models, stage, 1, 4 // world, folder=folder, lr_scheduler_type=schedule))
        runs[-1]["train"] = prompt_rows(12, SPARSE_KINDS)
    return runs
