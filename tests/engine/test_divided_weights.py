"""Models whose layers read the weights of a module that nobody calls, which ZeRO-3 has not fetched then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import STAGES

from alignment.config.errors import ModelError
from alignment.data.batching import collate
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import FrozenEngine, checked
from alignment.models.leaves import mark_leaves
from alignment.models.tasks import CAUSAL_LM, Task
from tools.architectures.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("own_process_group")


def built(kind: str, stage: str, *, leaves: bool, task: Task = CAUSAL_LM) -> FrozenEngine:
    """A frozen engine of a tiny model."""
    init_distributed(use_cpu=True)
    model = tiny_model(kind)
    config: dict[str, Any] = {**STAGES[stage], "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2}
    config["zero_optimization"] = config["zero_optimization"] | {"stage3_max_live_parameters": 10**7}
    if leaves:
        assert mark_leaves(model, config)
    return checked(FrozenEngine(task.scorer(model, False), config), task)


@pytest.mark.parametrize("kind", ["dbrx", "jetmoe"])
def test_such_a_model_is_refused_by_name_unless_its_layers_are_leaves(kind: str) -> None:
    with pytest.raises(
        ModelError, match=rf"\({kind}\) does not run with its weights divided by ZeRO-3.*stage below 3"
    ):
        built(kind, "stage3", leaves=False)
    batch = collate([(range(2, 10), range(10, 18)), (range(3, 9), range(20, 30))], 18)
    found = []
    for stage in ("stage0", "stage3"):
        engine = built(kind, stage, leaves=stage == "stage3")
        found.append(engine.sequence_scores(batch))
        engine.close()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("stage", "error"), [("stage3", torch.OutOfMemoryError("none left")), ("stage0", RuntimeError("another reason"))]
)
def test_what_has_another_reason_is_not_blamed_on_that(stage: str, error: RuntimeError) -> None:
    def failing(*args: Any) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        built("dbrx", stage, leaves=False, task=replace(CAUSAL_LM, check_scorer=failing))
