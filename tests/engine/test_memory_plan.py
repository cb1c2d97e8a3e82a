"""The memory plan against an allocator that counts, on the configurations of ``support/memory_cases.py``.

The plan is made for a CPU's attention, without what only a GPU allocates: its context, buffers of NCCL, workspaces of
kernels. Packed rows are measured with attention that allocates as a GPU's does (``support/varlen.py``). What a CPU
cannot confirm: the rounding and fragmentation of CUDA's caching allocator, workspaces of kernels for GPUs, and the
temporaries of quantization while 4-bit weights are loaded (those of dequantization are alike: one weight at a time).

Deviations are relative to the peak of the run, because only that decides whether a run fits: a small phase may be
planned with a larger error of its own. Loading is not compared, only that it is not what decides: a CPU quantizes in
other steps than a GPU, and the check of the scorer gathers weights that no plan knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from support.allocations import library
from support.memory_cases import MemoryCase, cases

from alignment.models.source import ModelSource
from alignment.planning.activations import Counting, Shape
from alignment.planning.gpu_terms import RESERVE
from alignment.planning.stand_in import ROWS, attention_of, stand_in
from tools.architectures.tiny import tiny_config
from tools.ranks import RankServer

Planned = Mapping[str, Mapping[str, float]]
Measure = Callable[..., dict[str, Any]]
WITHOUT_ENGINE, WITH_ENGINE = (-0.01, 0.06), (-0.03, 0.10)
# Phases of a run that the plan has under another name, or under one name.
SAME = {"kl": "reference", "eval reference": "reference", "eval kl": "reference", "eval rollout": "rollout"}
SAMPLE = (594,)  # in the default tests
FURTHER = (93,)  # packed rows with a soft cap, for which there is no kernel
EXPERTS = (102, 9573)  # quantized experts, in fp32 and bf16; half of the layers are recomputed
EXPERT_BYTES = 600_000  # of 2 or 4 of the 8 experts of these models, as of a part of those of a large one


def named(case: MemoryCase) -> str:
    return case.name


def deviations(planned: Planned, peaks: Mapping[str, int]) -> dict[str, float]:
    """Return how much more is planned than was measured in each phase and at the peak, as shares of the run's peak."""
    measured: dict[str, int] = {}
    for name, size in peaks.items():
        phase = SAME.get(name, name)
        measured[phase] = max(measured.get(phase, 0), size)
    total, sums = max(measured.values()), {name: sum(parts.values()) for name, parts in planned.items()}
    assert measured["load"] < total, "loading decides whether the run fits"
    compared = (sums.keys() & measured.keys()) - {"load"}
    found = {name: (sums[name] - measured[name]) / total for name in compared}
    return {**found, "peak": (max(sums.values()) - total) / total}


def wrong(planned: Planned, peaks: Mapping[str, int], within: tuple[float, float]) -> dict[str, str]:
    """Return the deviations that are outside of these limits."""
    low, high = within
    found = deviations(planned, peaks)
    return {name: f"{share:+.1%}" for name, share in found.items() if not low <= share <= high}


@pytest.fixture
def measure(ranks: RankServer, tmp_path: Path) -> Measure:
    def measured(case: MemoryCase, engine: bool, more: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
        spec, run = tmp_path / "spec.json", {"seed": case.seed, "engine": engine, "options": options}
        spec.write_text(json.dumps({"library": str(library()), "runs": [run], **(more or {})}))
        ranks.run(DRIVERS / "memory_runs.py", spec, nproc=case.ranks if engine else 1, timeout=900)
        found = [json.loads(file.read_text()).popitem()[1] for file in sorted(tmp_path.glob("rank*.json"))]
        names = found[0]["peaks"]
        return {**found[0], "peaks": {name: max(each["peaks"][name] for each in found) for name in names}}

    return measured


def check(found: dict[str, Any], within: tuple[float, float]) -> None:
    assert wrong(found["planned"], found["peaks"], within) == {}, (found["planned"], found["peaks"])
    peak = max(sum(parts.values()) for parts in found["planned"].values())
    assert peak * (1 + RESERVE) >= max(found["peaks"].values())


@pytest.mark.parametrize("case", map(MemoryCase.of, SAMPLE), ids=named)
def test_a_micro_batch_takes_the_planned_memory(measure: Measure, case: MemoryCase) -> None:
    found = measure(case, False)
    check(found, WITHOUT_ENGINE)
    # The instrument and the plan have the same weights, so that all else is compared.
    assert found["after"]["load"] == pytest.approx(found["after"]["weights"], rel=0.02, abs=2e5)
    # Plans that are made wrong fail: without one layer's activations, with half of them, or with two heads.
    train = found["planned"]["train"]
    for part, factor in (("layers", 1 - 1 / case.layers), ("layers", 0.5), ("head", 2.0), ("weights", 0.5)):
        made_wrong = {**found["planned"], "train": {**train, part: factor * train[part]}}
        assert wrong(made_wrong, found["peaks"], WITHOUT_ENGINE), part


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in (*cases(), *map(MemoryCase.of, FURTHER)) if case.seed not in SAMPLE], ids=named
)
def test_every_micro_batch_takes_the_planned_memory(measure: Measure, case: MemoryCase) -> None:
    check(measure(case, False), WITHOUT_ENGINE)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("case", map(MemoryCase.of, EXPERTS), ids=named)
def test_groups_of_experts_take_the_planned_memory(measure: Measure, case: MemoryCase, engine: bool) -> None:
    found = measure(case, engine, {"expert_bytes": EXPERT_BYTES})
    check(found, WITH_ENGINE if engine else WITHOUT_ENGINE)


@pytest.mark.parametrize(
    ("architecture", "requested", "eager", "scores"),
    [("llama", None, (), ()), ("llama", "eager", ROWS, ROWS),
     ("gemma2", None, ("padded",), ROWS), ("gpt_oss", None, ("padded",), ROWS)],
)  # fmt: skip
def test_scores_are_planned_unless_a_kernel_attends(
    architecture: str, requested: str | None, eager: tuple[str, ...], scores: tuple[str, ...]
) -> None:
    source = ModelSource("model", None, tiny_config(architecture), {})
    source.config._attn_implementation = requested
    model = stand_in(source, None, torch.float32, 1).model
    for rows in ROWS:
        assert (attention_of(model, "flash", rows) == "eager") == (rows in eager), rows
        count = Counting(source, None, torch.float32, "flash", checkpointing={}, rows=rows)
        short, long = (count(Shape(4, width, 4), gradients=False)[0].of(1)["layers"] for width in (256, 512))
        assert (long > 2 * short) == (rows in scores), rows


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=named)
def test_every_run_takes_the_planned_memory(measure: Measure, case: MemoryCase) -> None:
    found = measure(case, True)
    check(found, WITH_ENGINE)
    train = found["planned"]["train"]
    if "optimizer states" in train and train["optimizer states"] > 0.1 * sum(train.values()):
        halved = {
            phase: {**parts, "optimizer states": parts.get("optimizer states", 0) / 2}
            for phase, parts in found["planned"].items()
        }
        assert wrong(halved, found["peaks"], WITH_ENGINE), "states of fp32 are not those of 16 bits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1022, {"tiled_mlp": True, "activation_offloading": True}),
        (1022, {"tiled_mlp": True}),
        (176, {"tiled_mlp": True, "activation_offloading": True}),
        (176, {"activation_offloading": True}),
    ],
)
def test_a_run_with_less_memory_per_token(measure: Measure, seed: int, options: dict[str, bool]) -> None:
    check(measure(MemoryCase.of(seed), True, **options), WITH_ENGINE)
