"""The same window gives the same update for every split into micro-batch x accumulation x ranks, at every ZeRO stage.

Two windows per run, of 8 and of 7 rows, with plain SGD and a learning rate that changes the weights by several
percent, so that errors are visible. Everything is compared between splits (1e-5) and with a float64 computation that
shares no code with the package (1e-4). The runs are in ``split_runs.py``, the expected results in ``split_oracle.py``.
"""

from __future__ import annotations

import math

import pytest
from support.drivers import canned
from support.helpers import make_model
from support.oracle.dense import DPOOptions, solve
from support.oracle.pairs import Prompt, pairs_of
from support.split_oracle import OnlineSteps, answered, entropies, online_steps, oracle_steps
from support.split_results import Results, assert_logged, assert_same, distance, norm, train_all
from support.split_runs import CLIP, CLIPPED_STAGES, HEADS, JUDGED_STAGES, RATE, planned

from tools.ranks import RankServer

METRICS = ("loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METRICS += ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss", "entropy", "grad_norm")
SCORED = tuple(f"objective/{what}" for what in ("scores", "scores_margin", "rlhf_reward"))
SCORED += ("rewards/ignored", "rewards/reward/mean")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {kind: make_model(folder / kind, kind, seed=1) for kind in ("tied", *HEADS)}
    return kinds | {"reference": make_model(folder / "reference", "tied", seed=2)}


@pytest.fixture(scope="module")
def results(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory, ranks: RankServer) -> dict[int, Results]:
    """Return the outcomes of all runs by number of ranks and name, from two jobs for this whole file."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world{world}")
        found[world] = train_all(planned(world, models, str(folder)), world, folder, ranks)
    return found


@pytest.mark.parametrize("how", ["tokens", "blocks"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("method", ["KTO", "CPO"])
def test_micro_batches_by_tokens_and_by_blocks(results: dict[int, Results], method: str, world: int, how: str) -> None:
    """Other splits are in test_split_grid.py."""
    reference, outcome = results[1][f"{method}-plain"], results[world][f"{method}-stage2-{world}-{how}"]
    for step in (0, 1):
        assert_logged(outcome["logs"][step], reference["logs"][step], 1e-5, f"step {step + 1}")
        assert distance(outcome["updates"][step], reference["updates"][step]) <= 1e-5, f"step {step + 1}"


def test_all_losses_of_dpo_give_the_same_update_for_every_split(results: dict[int, Results]) -> None:
    """Also the loss that is a mean over tokens: 8 micro-batches of one pair on two ranks, and one of 8 pairs."""
    reference, outcome = results[1]["DPO-several"], results[2]["DPO-several-split"]
    for step in (0, 1):
        assert_logged(outcome["logs"][step], reference["logs"][step], 1e-5, f"step {step + 1}")
        assert distance(outcome["updates"][step], reference["updates"][step]) <= 1e-5, f"step {step + 1}"


@pytest.mark.parametrize("method", ["KTO", "CPO"])
def test_clipping_is_the_same_for_every_split(results: dict[int, Results], method: str) -> None:
    reference = results[1][f"{method}-stage0-1-clipped"]
    assert all(entry["grad_norm"] > 2 * CLIP for entry in reference["logs"]), "the norm is logged before clipping"
    for world, stages in CLIPPED_STAGES.items():
        for stage in stages:
            outcome = results[world][f"{method}-{stage}-{world}-clipped"]
            for step in (0, 1):
                assert_logged(outcome["logs"][step], reference["logs"][step], 1e-5, f"{stage} {world} {step}")
                assert distance(outcome["updates"][step], reference["updates"][step]) <= 1e-5


@pytest.mark.parametrize("method", ["KTO", "CPO"])
def test_evaluation_is_the_same_on_two_ranks(results: dict[int, Results], method: str) -> None:
    reference = results[1][f"{method}-stage0-1-clipped"]["evaluation"]
    assert {"eval_many_loss", "eval_one_loss", "eval_many_rewards/margins"} <= reference.keys()
    for world, stages in CLIPPED_STAGES.items():
        for stage in stages:
            found = results[world][f"{method}-{stage}-{world}-clipped"]["evaluation"]
            assert found.keys() == reference.keys()
            for name, value in reference.items():
                if not name.endswith(("runtime", "per_second")):
                    assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{stage} {world} {name}"


@pytest.mark.parametrize("world", [1, 2])
def test_rates_count_the_rows_of_all_ranks(results: dict[int, Results], world: int) -> None:
    for method in ("KTO", "CPO"):
        outcome = results[world][f"{method}-stage2-{world}-clipped"]
        end = next(entry for entry in outcome["log"] if "train_runtime" in entry)
        assert end["train_samples_per_second"] * end["train_runtime"] == pytest.approx(15)  # 8 rows and 7
        assert end["train_steps_per_second"] * end["train_runtime"] == pytest.approx(2)
        found, sets = outcome["evaluation"], outcome["run"]["eval"]
        for name, rows in sets.items():
            seconds = found[f"eval_{name}_runtime"]
            assert found[f"eval_{name}_samples_per_second"] * seconds == pytest.approx(len(rows)), name
            batches = math.ceil(len(rows) / 4)  # of all ranks together
            assert found[f"eval_{name}_steps_per_second"] * seconds == pytest.approx(batches), name


@pytest.mark.parametrize(
    "name",
    [
        "KTO-plain",
        "CPO-plain",
        "DPO-plain",
        "DPO-hinge",
        "DPO-ipo",
        "DPO-several",
        "KTO-stage0-1-clipped",
        "CPO-stage0-1-clipped",
    ]
    + [f"CPO-{head}-{stage}" for head, stages in HEADS.items() for stage in stages],
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
            METRICS,
        )
        assert distance(update, expected.update) <= 1e-4
        assert norm(update) / norm(expected.weights) >= 1e-2, "too small a step could hide an error"
        if "KTO" in name:
            assert log["kl"] > 0.01, "a clamped KL would hide an error"
            assert expected.metrics["kl"] > 0.01


# Online DPO: completions are those of drivers/canned.py, so the expected pairs of a window are known ---------------

RANKED = {1: "OnlineDPO-ranked-stage0-1", 2: "OnlineDPO-ranked-stage3-2"}


@pytest.mark.parametrize("world", [1, 2])
def test_every_split_of_the_pairs_gives_the_same_update(results: dict[int, Results], world: int) -> None:
    """Splits of plain pairs are in test_split_grid.py."""
    runs = {"tokens": (results[world][f"OnlineDPO-stage2-{world}-tokens"], results[1]["OnlineDPO-plain"])}
    runs |= {"ranked": (results[world][RANKED[world]], results[1][RANKED[1]])}
    sparse = [name for name in results[world] if "sparse" in name]
    runs |= {name: (results[world][name], results[1]["OnlineDPO-sparse-stage0-1"]) for name in sparse}
    for name, (outcome, expected) in runs.items():
        assert len(outcome["logs"]) == len(expected["logs"]) >= 2
        for step, (found, wanted) in enumerate(zip(outcome["logs"], expected["logs"])):
            assert_logged(found, wanted, 1e-5, f"{name} step {step + 1}")
            if norm(expected["updates"][step]):
                assert distance(outcome["updates"][step], expected["updates"][step]) <= 1e-5, f"{name} {step + 1}"


@pytest.mark.parametrize(("world", "stage"), JUDGED_STAGES.items())
def test_a_judge_gives_the_same_update_as_equivalent_rewards(
    results: dict[int, Results], world: int, stage: str
) -> None:
    """For every split, without metrics that require scores."""
    outcome, reference = results[world][f"OnlineDPO-judged-{stage}-{world}"], results[1]["OnlineDPO-plain"]
    for step, (found, rewarded) in enumerate(zip(outcome["logs"], reference["logs"], strict=True)):
        expected = {name: value for name, value in rewarded.items() if name not in SCORED}
        # The judge cannot decide about a single score, or none.
        expected["pairs/failed"] = rewarded["pairs/tied"] + rewarded["pairs/unscored"]
        expected |= {"pairs/tied": 0.0, "pairs/unscored": 0.0}
        assert_logged(found, expected, 1e-5, f"{stage} on {world} step {step + 1}")
        assert distance(outcome["updates"][step], reference["updates"][step]) <= 1e-5
    assert outcome["logs"][0]["pairs/failed"] == pytest.approx(2 / 8)


@pytest.fixture(scope="module")
def solved(results: dict[int, Results]) -> dict[str, OnlineSteps]:
    names = ("OnlineDPO-plain", RANKED[1], "OnlineDPO-sparse-stage0-1")
    return {name: online_steps(results[1][name]) for name in names}


@pytest.mark.parametrize("name", ["OnlineDPO-plain", RANKED[1], "OnlineDPO-sparse-stage0-1"])
def test_online_dpo_against_the_float64_oracle(
    results: dict[int, Results], solved: dict[str, OnlineSteps], name: str
) -> None:
    outcome = results[1][name]
    steps, logs, _ = solved[name]
    assert len(steps) == len(outcome["logs"]) == len(outcome["updates"])
    for number, (step, expected) in enumerate(zip(steps, logs)):
        assert_logged(outcome["logs"][number], expected, 1e-4, f"{name} step {number + 1}")
        if step is not None:
            update = outcome["updates"][number]
            assert distance(update, step.update) <= 1e-4
            assert norm(update) / norm(step.weights) >= 1e-2, "too small a step could hide an error"
            assert abs(expected["objective/kl"]) > 0.05


def test_the_runs_cover_all_kinds_of_pairs(results: dict[int, Results]) -> None:
    """Prompts dropped for each reason, completions with and without an end, an odd number of pairs."""
    pairs, metrics = pairs_of(answered(results[1]["OnlineDPO-plain"]["windows"][0], 2))
    assert len(pairs) == 5
    assert [metrics[f"pairs/{reason}"] for reason in ("tied", "identical", "unscored")] == [1 / 8] * 3
    ends = {pair[f"{side}_ids"][-1] == canned.EOS for pair in pairs for side in ("chosen", "rejected")}
    assert ends == {True, False}
    ranked = answered(results[1][RANKED[1]]["windows"][0], 3)
    pairs, metrics = pairs_of(ranked, 0.75)
    assert len(pairs) == 7 and metrics["rewards/ignored"] == 1 / 24 and metrics["pairs/identical"] == 1 / 8
    chosen = {tuple(pair["chosen_ids"]) for pair in pairs}
    assert {place for prompt in ranked for place, one in enumerate(prompt.made) if one.ids in chosen} == {0, 1, 2}
    assert pairs_of(ranked)[0] != pairs, "the penalty has an effect"


@pytest.mark.parametrize("name", ["sparse-stage0-1", "sparse-stage2-2", "sparse-stage3-2"])
def test_windows_without_pairs_leave_the_weights_unchanged(results: dict[int, Results], name: str) -> None:
    """And with a single pair, which leaves the second rank without any, training continues."""
    outcome = results[int(name[-1])][f"OnlineDPO-{name}"]
    assert [len(pairs_of(answered(window, 2))[0]) for window in outcome["windows"]] == [0, 1, 4]
    first, second, third = outcome["updates"]
    assert all(not bool(value.any()) for value in first.values()), "bitwise: no weight changes"
    assert norm(second) > 0 and norm(third) > 0
    logged = outcome["logs"][0]
    assert logged["grad_norm"] == 0.0 and logged["pairs/dropped"] == 1.0
    assert not {"loss", "objective/kl", "rewards/chosen", "logps/chosen"} & logged.keys()
    rates = [entry["learning_rate"] / RATE["OnlineDPO"] for entry in outcome["logs"]]
    assert rates == pytest.approx([1, 2 / 3, 1 / 3])
    end = outcome["log"][-1]
    assert end["windows_without_pairs"] == 1
    assert end["train_loss"] == pytest.approx(sum(entry["loss"] for entry in outcome["logs"][1:]) / 2, rel=1e-6)


def test_online_evaluation_is_correct_and_the_same_on_two_ranks(
    results: dict[int, Results], solved: dict[str, OnlineSteps]
) -> None:
    outcome, (*_, model) = results[1][RANKED[1]], solved[RANKED[1]]
    run = outcome["run"]
    expected = {}
    for name, rows in run["eval"].items():
        now, start = answered(rows, 3), answered(rows, 1)
        pairs, metrics = pairs_of(now, 0.75)
        metrics |= solve(model, pairs, DPOOptions(loss_type="ipo", beta=0.2), run["ref_model"]).metrics
        metrics |= {**entropies(model, pairs), "beta": 0.2, "win_rate": win_rate(now, start)}
        expected |= {f"eval_{name}_{key}": value for key, value in metrics.items()}
    for world in (1, 2):
        found = results[world][RANKED[world]]["evaluation"]
        timed = ("runtime", "per_second")
        assert_logged({n: v for n, v in found.items() if not n.endswith(timed)}, expected, 1e-4, f"{world} ranks")
        for name, value in outcome["evaluation"].items():
            if not name.endswith(timed):
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{world} ranks: {name}"


def win_rate(now: list[Prompt], start: list[Prompt]) -> float:
    """Return the win rate of first completions over the initial policy's; ties count half."""
    scores = [(one.made[0].score(0.75), other.made[0].score(0.75)) for one, other in zip(now, start)]
    known = [(mine, other) for mine, other in scores if mine is not None and other is not None]
    return sum(1.0 if mine > other else 0.5 * (mine == other) for mine, other in known) / len(known)
