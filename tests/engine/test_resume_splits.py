"""Runs resumed with a different number of ranks or ZeRO stage: the same updates up to rounding.

Online DPO with fixed completions, in fp32, with weight decay in one of two parameter groups, and no dropout: the only
remaining randomness is the order of the prompts. The checkpoint is in the folder of another run.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, selected_cases
from safetensors.torch import load_file
from support.drivers.canned import LONGEST, Kind
from support.helpers import STAGES, make_model, zero
from support.resume_comparison import timeless
from support.split_results import Update, assert_logged, distance, norm
from support.split_runs import prompt_rows

from tools.ranks import RankServer

Split = tuple[str, int]
ENGINES = {**STAGES, "stage2": zero(2)}
ENGINES["stage2"]["zero_optimization"]["round_robin_gradients"] = True  # which orders what each rank has
SPLITS: list[Split] = [(stage, ranks) for stage in ("stage0", "stage2", "stage3") for ranks in (1, 2)]
PAIRS = list(itertools.permutations(SPLITS, 2))
# The checkpoint is of a step within the first epoch; later updates must agree to this relative norm.
POINT, STEPS, CLOSE = 2, 5, 1e-4
_TEST = "test_updates_match_those_of_the_new_split"
KINDS = (None, None, None, None, Kind.TIED, None, Kind.SOME_UNSCORED)

pytestmark = pytest.mark.ci


def name_of(split: Split) -> str:
    """Return a name such as ``stage2-1``."""
    return "-".join(map(str, split))


def pair_name(case: tuple[Split, Split]) -> str:
    """Return a name such as ``stage2-1-to-stage3-2``."""
    return "-to-".join(map(name_of, case))


def run(name: str, split: Split, model: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return a run for ``drivers/runs.py``: windows of 4 prompts, 3 per epoch, and evaluations after 3 and 5."""
    stage, ranks = split
    args = {
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2 // ranks,
        "max_steps": STEPS,
        "learning_rate": 0.02,
        "lr_scheduler_type": "linear",
        # Adam normalizes gradients: with a smaller epsilon, rounding errors would determine small updates.
        "adam_epsilon": 0.02,
        "weight_decay": 0.1,
        "max_length": 64,
        "max_new_tokens": LONGEST + 1,
        "reward_funcs": f"{DRIVERS / 'canned.py'}:reward",
        "deepspeed": ENGINES[stage],
        "ref_placement": "replica",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_steps": 1,
        "disable_tqdm": True,
        **more,
    }
    return {
        "name": name,
        "trainer": "OnlineDPO",
        "model": model,
        "args": args,
        "train": prompt_rows(12, KINDS),
        "eval": prompt_rows(5, (), seed=9),
        "save": str(folder / f"{name}-final"),
    }


def train(runs: list[tuple[Split, dict[str, Any]]], folder: Path, ranks: RankServer) -> None:
    """Train all runs, in one job per number of ranks."""
    for world in (1, 2):
        spec = folder / f"spec-{world}.json"
        spec.write_text(json.dumps([made for (_, size), made in runs if size == world]))
        ranks.run(DRIVERS / "runs.py", spec, nproc=world, timeout=60 + 10 * len(runs))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest) -> Path:
    """Train the runs of the selected tests: one per split, and one per pair from a checkpoint of the first split."""
    folder, cases = tmp_path_factory.mktemp("splits"), selected_cases(request, _TEST)
    model = make_model(folder / "model", "odd", seed=1, layers=1)
    splits = [split for split in SPLITS if any(split in case for case in cases)]
    train([(split, run(name_of(split), split, model, folder)) for split in splits], folder, ranks)
    goes_on = []
    for before, now in cases:
        checkpoint = folder / name_of(before) / f"checkpoint-{POINT}"
        more = {"resume_from_checkpoint": str(checkpoint), "save_strategy": "no"}
        goes_on.append((now, run(pair_name((before, now)), now, model, folder, **more)))
    train(goes_on, folder, ranks)
    return folder


def weights(folder: Path, start: str) -> Update:
    """Return the weights of a run's checkpoint in float64."""
    found = load_file(folder / start / f"checkpoint-{POINT}" / "model.safetensors")
    return {name: value.double() for name, value in found.items()}


def update(folder: Path, name: str, start: str) -> Update:
    """Return the difference of a run's weights to those of a checkpoint."""
    before = weights(folder, start)
    after = load_file(folder / f"{name}-final" / "model.safetensors")
    return {key: after[key].double() - before[key] for key in after}


def logged(folder: Path, name: str) -> list[dict[str, float]]:
    """Return everything that a run logged except times, including the last evaluation."""
    outcome = json.loads((folder / f"{name}.json").read_text())
    return timeless([*outcome["log"], outcome["evaluation"]])


@pytest.mark.parametrize("case", PAIRS, ids=pair_name)
def test_updates_match_those_of_the_new_split(case: tuple[Split, Split], trained: Path) -> None:
    name, before, now = pair_name(case), name_of(case[0]), name_of(case[1])
    made, wanted = update(trained, name, before), update(trained, now, now)
    assert norm(wanted) >= 0.01 * norm(weights(trained, now)), "too small an update could hide a wrong one"
    assert distance(made, wanted) <= CLOSE
    found, expected = logged(trained, name), logged(trained, now)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_logged(one, other, CLOSE, f"record {number}")
    wins = [record["eval_win_rate"] for record in found if "eval_win_rate" in record]
    assert len(wins) == 4 and 0 < wins[0] < 1
