"""What the memory plan says about the runs of :mod:`memory_cases`: bytes of each phase, by part."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from alignment.models.source import ModelSource
from alignment.planning.activations import Shape, Trend
from alignment.planning.engine_bytes import EngineBytes
from alignment.planning.phases import Phases as Assembly
from alignment.planning.planner import Planner
from alignment.training.trainer import AlignmentTrainer
from support.memory_cases import MemoryCase

Phases = dict[str, dict[str, float]]


@dataclass
class PartlyScored(Planner):
    """Plans a run in which a share of the tokens is scored; a plan of a run is that of all of them."""

    share: float = 1.0

    def activations(self, source: ModelSource, shape: Shape, **how: Any) -> tuple[Trend, Trend]:
        scored = max(1, int(shape.scored * self.share))
        return super().activations(source, shape._replace(scored=scored), **how)


def planner_of(case: MemoryCase, trainer: AlignmentTrainer) -> Planner:
    """Return the planner of a trainer's run, on the CPU's attention kernel: without what only a GPU allocates."""
    each = 2 if case.method in ("CPO", "DPO", "OnlineDPO", "Reward") else 1
    return PartlyScored(
        options=trainer.args,
        engines=trainer.planned.engines,
        ranks=case.ranks,
        sequences=each,
        referenced=2 if case.method == "KTO" else each,
        kernel="cpu",
        aux_loss=trainer.planned.aux_coefficient is not None,
        share=case.scored,
    )


def with_engine(case: MemoryCase, trainer: AlignmentTrainer) -> Phases:
    """Return the plan of the run. Host memory, where hidden states may be, is the same here."""
    plan = planner_of(case, trainer).plan(case.length, case.checkpointed)
    kept = {"hidden states": plan.host["train"].get("hidden states", 0.0)}
    return {name: {**parts, **(kept if name not in ("load", "reference") else {})} for name, parts in plan.gpu.items()}


def without_engine(case: MemoryCase, trainer: AlignmentTrainer) -> Phases:
    """Return the plan of the same pass without an engine: gradients have the dtype of the weights."""
    planner = planner_of(case, trainer)
    weights = planner.weights
    assert weights is not None
    gradients: dict[str, Any] = {"gradients": weights.trained * trainer.planned.engines.compute.itemsize}

    class Alone(Assembly):
        engine = functools.cached_property(lambda self: EngineBytes({}, {}, 1.0, gradients, {}, {}))  # type: ignore[assignment]
        _others = functools.cached_property(lambda self: {})  # type: ignore[assignment]

    Alone.engine.__set_name__(Alone, "engine")
    Alone._others.__set_name__(Alone, "_others")
    assembly = Alone(planner, weights, case.length, case.checkpointed, None)
    return {"load": assembly._load(), "train": assembly._train(), "evaluate": assembly._scoring(assembly._evaluated)}
