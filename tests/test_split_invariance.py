"""The same window gives the same update for every split into micro-batch x accumulation x ranks, at every ZeRO stage.

Two windows per run, of 8 and of 7 rows, by plain SGD with a learning rate that moves the weights by percents: a test
of equal weights at 1e-6 could not fail. Everything is compared between splits (1e-5) and with a float64 computation
that shares no code with the package (1e-4).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import STAGES, make_model, paired_rows, unpaired_rows
from oracle.dense import CPOOptions, KTOOptions, Step, load, solve
from oracle.distributions import distribution_metrics
from safetensors.torch import load_file
from torch import Tensor

from alignment.data.windows import RowTable, WindowSampler

DRIVER = Path(__file__).parent / "drivers" / "runs.py"
SPLITS = {1: ((8, 1), (4, 2), (1, 8)), 2: ((4, 1), (2, 2), (1, 4))}
ROWS, FIRST = 15, 8
RATE = {"KTO": 0.4, "CPO": 0.1, "SFT": 0.2}
METHOD = {
    "KTO": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "CPO": {"beta": 0.2, "cpo_alpha": 0.8, "label_smoothing": 0.1},
    "SFT": {},
}
CLIP = 0.05
METRICS = ("loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METRICS += ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss", "entropy", "grad_norm")
COUNTS = ("count/chosen", "count/rejected", "rewards/chosen_sum", "logps/rejected_sum")
HEADS = ("untied", "capped", "scaled")


def rows_of(method: str) -> list[dict[str, Any]]:
    """15 rows, labelled so that the first window has 6 desirable and 2 undesirable ones."""
    if method == "CPO":
        return paired_rows(ROWS, seed=5)
    rows = unpaired_rows(ROWS, seed=4)
    blank = np.ones(ROWS, dtype=np.int64)
    sampler = WindowSampler(RowTable(blank, blank[:, None]), world_size=1, batch_size=8, accumulation=1, seed=42)
    for place, row in enumerate(sampler.order(0)):
        rows[int(row)]["label"] = place < 6 or place >= 11
    return rows


def run(
    name: str, method: str, models: dict[str, str], stage: str, micro: int, steps: int, **more: Any
) -> dict[str, Any]:
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
        "max_prompt_length": None,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "deepspeed": STAGES[stage],
        **METHOD[method],
        **more,
    }
    if method == "KTO":
        options["ref_placement"] = placements[(micro + len(stage)) % 3]
    reference = models["reference"] if method == "KTO" else None
    return {
        "name": name,
        "trainer": method,
        "model": models[more.get("run_name", "tied")],
        "ref_model": reference,
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
    return runs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {kind: make_model(folder / kind, kind, seed=1) for kind in ("tied", *HEADS)}
    return kinds | {"reference": make_model(folder / "reference", "tied", seed=2)}


Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., Any]
) -> dict[int, Results]:
    """The outcome of all runs by number of ranks and name: two launches for everything in this file."""
    found: dict[int, Results] = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world{world}")
        spec = folder / "spec.json"
        runs = planned(world, models, str(folder))
        spec.write_text(json.dumps(runs))
        launcher = {1: "python", 2: "torchrun"}[world]
        done = launch(DRIVER, spec, nproc=world, launcher=launcher, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        found[world] = {}
        for one in runs:
            outcome = json.loads((folder / f"{one['name']}.json").read_text())
            before = load_file(Path(one["model"]) / "model.safetensors")
            updates = []
            for step in (1, 2):
                after = load_file(folder / one["name"] / f"checkpoint-{step}" / "model.safetensors")
                updates.append({key: after[key].double() - before[key].double() for key in after})
                before = after
            logs = [entry for entry in outcome["log"] if "loss" in entry]
            found[world][one["name"]] = {**outcome, "logs": logs, "updates": updates, "run": one}
    return found


def norm(update: dict[str, Tensor]) -> float:
    return float(
        torch.sqrt(sum(((value**2).sum() for value in update.values()), torch.zeros((), dtype=torch.float64)))
    )


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return norm({key: one[key] - other[key].double() for key in one}) / norm(other)


def assert_same(found: dict[str, Any], metrics: dict[str, float], tolerance: float, what: str) -> None:
    for name in METRICS:
        assert (name in found) == (name in metrics), f"{what}: {name}"
        if name in metrics:
            # Relative for what is optimised; a margin is a small difference of rewards of order one.
            scale = abs(metrics[name]) if name in ("loss", "grad_norm") else max(abs(metrics[name]), 1.0)
            error = abs(found[name] - metrics[name])
            assert error <= tolerance * scale, f"{what}: {name} {found[name]} {metrics[name]}"


@pytest.mark.parametrize("method", ["KTO", "CPO"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_split_gives_the_same_update(results: dict[int, Results], method: str, world: int) -> None:
    reference = results[1][f"{method}-stage0-1x8x1"]
    compared = 0
    for name, outcome in results[world].items():
        if not name.startswith(method) or "clipped" in name or any(head in name for head in HEADS):
            continue
        for step in (0, 1):
            expected, update = reference["logs"][step], reference["updates"][step]
            assert_same(outcome["logs"][step], expected, 1e-5, f"{name} step {step + 1}")
            assert outcome["logs"][step]["num_tokens"] == expected["num_tokens"]
            for count in COUNTS if method == "KTO" else ():
                assert outcome["logs"][step][count] == pytest.approx(expected[count], rel=1e-5)
            assert distance(outcome["updates"][step], update) <= 1e-5, f"{name} step {step + 1}"
        compared += 1
    assert compared == 17


@pytest.mark.parametrize("stage", ["stage0", "stage2", "stage3"])
def test_sft_is_the_same_on_two_ranks(results: dict[int, Results], stage: str) -> None:
    """What it should be on one is in tests/test_sft.py."""
    reference, found = results[1]["SFT-stage0-1"], results[2][f"SFT-{stage}-2"]
    for step in (0, 1):
        assert_same(found["logs"][step], reference["logs"][step], 1e-5, f"step {step + 1}")
        accuracies = [one["logs"][step]["mean_token_accuracy"] for one in (found, reference)]
        assert accuracies[0] == pytest.approx(accuracies[1])
        assert distance(found["updates"][step], reference["updates"][step]) <= 1e-5


@pytest.mark.parametrize("method", ["KTO", "CPO"])
def test_clipping_is_the_same_for_every_split(results: dict[int, Results], method: str) -> None:
    reference = results[1][f"{method}-stage0-1-clipped"]
    assert all(entry["grad_norm"] > 2 * CLIP for entry in reference["logs"]), "the norm is logged before clipping"
    for world in (1, 2):
        for stage in ("stage0", "stage2", "stage3"):
            outcome = results[world][f"{method}-{stage}-{world}-clipped"]
            for step in (0, 1):
                assert_same(outcome["logs"][step], reference["logs"][step], 1e-5, f"{stage} {world} {step}")
                assert distance(outcome["updates"][step], reference["updates"][step]) <= 1e-5


@pytest.mark.parametrize("method", ["KTO", "CPO"])
def test_evaluation_is_the_same_on_two_ranks(results: dict[int, Results], method: str) -> None:
    reference = results[1][f"{method}-stage0-1-clipped"]["evaluation"]
    assert {"eval_many_loss", "eval_one_loss", "eval_many_rewards/margins"} <= reference.keys()
    for world in (1, 2):
        for stage in ("stage0", "stage2", "stage3"):
            found = results[world][f"{method}-{stage}-{world}-clipped"]["evaluation"]
            assert found.keys() == reference.keys()
            for name, value in reference.items():
                if not name.endswith(("runtime", "per_second")):
                    assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{stage} {world} {name}"


def oracle_steps(outcome: dict[str, Any]) -> list[Step]:
    """Both steps in float64, the second one from the float64 weights of the first."""
    run, steps = outcome["run"], []
    args = run["args"]
    common = {"max_length": 64, "learning_rate": args["learning_rate"], "max_grad_norm": args["max_grad_norm"] or None}
    options = {"KTO": KTOOptions, "CPO": CPOOptions}[run["trainer"]](**METHOD[run["trainer"]], **common)
    model = load(run["model"])
    for rows in outcome["windows"]:
        steps.append(solve(model, rows, options, run["ref_model"]))
        steps[-1].metrics.update(distribution_metrics(model, rows, options.max_length))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += steps[-1].update[name]
    return steps


@pytest.mark.parametrize(
    "name",
    ["KTO-stage0-1x8x1", "CPO-stage0-1x8x1", "KTO-stage0-1-clipped", "CPO-stage0-1-clipped"]
    + [f"CPO-{head}-{stage}" for head in HEADS for stage in ("stage0", "stage2", "stage3")],
)
def test_against_the_float64_oracle(results: dict[int, Results], name: str) -> None:
    outcome = results[2 if any(head in name for head in HEADS) else 1][name]
    assert [len(rows) for rows in outcome["windows"]] == [8, 7]
    for step, (expected, log, update) in enumerate(zip(oracle_steps(outcome), outcome["logs"], outcome["updates"])):
        assert_same(
            log,
            {**expected.metrics, "loss": expected.loss, "grad_norm": expected.grad_norm},
            1e-4,
            f"{name} step {step + 1}",
        )
        assert distance(update, expected.update) <= 1e-4
        assert norm(update) / norm(expected.weights) >= 1e-2, "too small a step could hide a wrong one"
        if "KTO" in name:
            assert log["kl"] > 0.01, "a clamped KL would hide a wrong one"
            assert expected.metrics["kl"] > 0.01


def test_labels_of_the_first_window(results: dict[int, Results]) -> None:
    rows = results[1]["KTO-stage0-1x8x1"]["windows"][0]
    assert sorted(row["label"] for row in rows) == [False] * 2 + [True] * 6
    assert len({len(row["completion_ids"]) for row in rows}) > 4
