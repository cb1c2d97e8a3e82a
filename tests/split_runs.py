"""The runs of ``test_split_invariance.py``: what each of them trains, and how its windows are split."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from drivers.canned import LONGEST, Kind
from helpers import STAGES, paired_rows, text, unpaired_rows

from alignment.data.windows import RowTable, WindowSampler

SPLITS = {1: ((8, 1), (4, 2), (1, 8)), 2: ((4, 1), (2, 2), (1, 4))}
ONLINE_SPLITS = {
    1: {"stage0": (8, 1), "stage3": (1, 8)},
    2: {"stage0": (2, 2), "stage2": (4, 1), "stage3": (1, 4), "stage2-offload": (2, 2), "stage3-offload": (4, 1)},
}
ROWS = 15
RATE = {"KTO": 0.4, "CPO": 0.1, "SFT": 0.2, "OnlineDPO": 0.2}
METHOD: dict[str, dict[str, Any]] = {
    "KTO": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "CPO": {"beta": 0.2, "cpo_alpha": 0.8, "label_smoothing": 0.1},
    "SFT": {},
    "OnlineDPO": {
        "beta": 0.2,
        "max_new_tokens": LONGEST + 1,
        "reward_funcs": f"{Path(__file__).parent / 'drivers' / 'canned.py'}:reward",
    },
}
# The judge prefers as the reward function does, so it has to leave the same pairs.
JUDGED = {"reward_funcs": None, "judge": f"{Path(__file__).parent / 'drivers' / 'canned.py'}:judge"}
JUDGED_STAGES = ("stage0", "stage3")
CLIP = 0.05
HEADS = ("untied", "capped", "scaled")
# Of the first window of an Online DPO run an odd number of pairs is left, so that two ranks cannot have equally many.
FIRST_KINDS = (Kind.IDENTICAL, None, Kind.TIED, None, None, Kind.SOME_UNSCORED)
# One run has windows of 4 prompts: no pair is left of the first, one of the second, so none for the second rank.
SPARSE_KINDS = (*(Kind.TIED, Kind.IDENTICAL, Kind.UNSCORED, Kind.TIED), *(Kind.TIED, Kind.IDENTICAL, None, Kind.TIED))
# More completions, another loss, a beta for each of two epochs, a penalty that sets identical texts apart.
RANKED = {"loss_type": "ipo", "num_generations": 3, "beta": [0.5, 0.2], "num_train_epochs": 2}
RANKED |= {"missing_eos_penalty": 0.75}
RANKED_KINDS = (None, Kind.ENDED_APART, None, None, Kind.SOME_UNSCORED)


def order(count: int) -> list[int]:
    """The order of the rows in the first epoch."""
    blank = np.ones(count, dtype=np.int64)
    sampler = WindowSampler(RowTable(blank, blank[:, None]), world_size=1, batch_size=8, accumulation=1, seed=42)
    return [int(row) for row in sampler.order(0)]


def prompt_rows(count: int, kinds: tuple[Kind | None, ...], seed: int = 6) -> list[dict[str, Any]]:
    """Prompts of unequal lengths, the first of which in the order of training are of these kinds."""
    rng = random.Random(seed)
    rows = [{"prompt": text(rng, 2, 12)} for _ in range(count)]
    for row, kind in zip(order(count), kinds):
        if kind is not None:
            rows[row]["prompt"] = f"{int(kind)}{rows[row]['prompt']}"
    return rows


def rows_of(method: str) -> list[dict[str, Any]]:
    """15 rows, labelled so that the first window has 6 desirable and 2 undesirable ones."""
    if method == "CPO":
        return paired_rows(ROWS, seed=5)
    if method == "OnlineDPO":
        return prompt_rows(ROWS, FIRST_KINDS)
    rows = unpaired_rows(ROWS, seed=4)
    for place, row in enumerate(order(ROWS)):
        rows[row]["label"] = place < 6 or place >= 11
    return rows


def run(
    name: str, method: str, models: dict[str, str], stage: str, micro: int, steps: int, **more: Any
) -> dict[str, Any]:
    """One run as ``drivers/runs.py`` takes it; ``more`` are options."""
    placements = ("replica", "sharded", "offload")
    options = {
        "output_dir": more.pop("folder") + f"/{name}",
        "optim": "sgd",
        "learning_rate": more.pop("rate", RATE[method]),
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
    has_reference = method in ("KTO", "OnlineDPO")
    if has_reference:
        options["ref_placement"] = placements[(micro + len(stage)) % 3]
    return {
        "name": name,
        "trainer": method,
        "model": models[more.get("run_name", "tied")],
        "ref_model": models["reference"] if has_reference else None,
        "args": options,
        "train": rows_of(method),
    }


def planned(world: int, models: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """Every run of one launch."""
    runs = []
    for method in ("KTO", "CPO"):
        for micro, steps in SPLITS[world]:
            for stage in STAGES:
                name = f"{method}-{stage}-{world}x{micro}x{steps}"
                runs.append(run(name, method, models, stage, micro, steps, folder=folder))
        for stage in ("stage0", "stage2", "stage3"):
            name = f"{method}-{stage}-{world}-clipped"
            runs.append(run(name, method, models, stage, 2, 4 // world, folder=folder, max_grad_norm=CLIP, rate=5.0))
            # Evaluated as well: many rows, and fewer than the ranks have places for.
            many = unpaired_rows(21, seed=8) if method == "KTO" else paired_rows(21, seed=8)
            runs[-1] |= {"eval": {"many": many, "one": many[:1]}}
            runs[-1]["args"]["per_device_eval_batch_size"] = 4 // world
        tokens = {"KTO": 64, "CPO": 128}[method]
        name = f"{method}-stage2-{world}-tokens"
        runs.append(run(name, method, models, "stage2", 4, 2 // world, folder=folder, max_tokens_per_batch=tokens))
        name = f"{method}-stage2-{world}-blocks"
        runs.append(run(name, method, models, "stage2", 4, 2 // world, folder=folder) | {"block_cost": 1})
    for stage in ("stage0", "stage2", "stage3"):
        runs.append(run(f"SFT-{stage}-{world}", "SFT", models, stage, 2, 4 // world, folder=folder))
    if world == 2:
        for head in HEADS:
            for stage in ("stage0", "stage2", "stage3"):
                rate = 0.2 if head == "scaled" else RATE["CPO"]
                name = f"CPO-{head}-{stage}"
                runs.append(run(name, "CPO", models, stage, 2, 2, folder=folder, run_name=head, rate=rate))
    return runs + online_runs(world, models, folder)


def online_runs(world: int, models: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """Fewer splits than of the other methods: here they differ only in how the pairs are dealt out."""
    runs = []
    for stage, (micro, steps) in ONLINE_SPLITS[world].items():
        more = {"max_tokens_per_batch": 128} if stage == "stage2-offload" else {}
        name = f"OnlineDPO-{stage}-{world}"
        runs.append(run(name, "OnlineDPO", models, stage, micro, steps, folder=folder, **more))
    stage = {1: "stage0", 2: "stage3"}[world]
    name = f"OnlineDPO-ranked-{stage}-{world}"
    runs.append(run(name, "OnlineDPO", models, stage, 2, 4 // world, folder=folder, rate=0.002, **RANKED))
    runs[-1]["train"] = prompt_rows(8, RANKED_KINDS, seed=8)
    many = prompt_rows(13, (Kind.SOME_UNSCORED, Kind.IDENTICAL, None, None, Kind.UNSCORED), seed=9)
    runs[-1] |= {"eval": {"many": many, "one": many[1:2]}}
    runs[-1]["args"]["per_device_eval_batch_size"] = 4 // world
    for stage in JUDGED_STAGES:  # the 5 pairs of the first window leave the second rank's last micro-batch empty
        name = f"OnlineDPO-judged-{stage}-{world}"
        runs.append(run(name, "OnlineDPO", models, stage, 2, 4 // world, folder=folder, **JUDGED))
    for stage in {1: ("stage0",), 2: ("stage2", "stage3")}[world]:
        name, schedule = f"OnlineDPO-sparse-{stage}-{world}", "linear"
        runs.append(run(name, "OnlineDPO", models, stage, 1, 4 // world, folder=folder, lr_scheduler_type=schedule))
        runs[-1]["train"] = prompt_rows(12, SPARSE_KINDS)
    return runs
