"""Models whose layers read the weights of a module that is never called, so that ZeRO-3 does not gather them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.helpers import STAGES

from alignment.config.errors import ModelError
from alignment.data.batching import collate
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import FrozenEngine, checked
from alignment.models.partitioning import mark_leaves
from alignment.models.tasks import CAUSAL_LM, Task
from tools.architectures.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("own_process_group")


def built(kind: str, stage: str, *, leaves: bool, task: Task = CAUSAL_LM) -> FrozenEngine:
    """Return a frozen engine of a tiny model."""
    init_distributed(use_cpu=True)
    model = tiny_model(kind)
    config: dict[str, Any] = {**STAGES[stage], "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2}
    config["zero_optimization"] = config["zero_optimization"] | {"stage3_max_live_parameters": 10**7}
    if leaves:
        assert mark_leaves(model, config)
    return checked(FrozenEngine(task.scorer(model, False), config), task)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("kind", ["dbrx", "jetmoe"])
def test_such_a_model_scores_like_the_unsharded_one(kind: str, leaves: bool) -> None:
    """The first pass of its check goes through the wrapped module, in which DeepSpeed finds such weights."""
    batch = collate([(range(2, 10), range(10, 18)), (range(3, 9), range(20, 30))], 18)
    found = []
    for stage in ("stage0", "stage3"):
        with contextlib.closing(built(kind, stage, leaves=leaves and stage == "stage3")) as engine:
            found.append(engine.forward(batch).scores)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("stage", "error", "raised", "said"),
    [
        ("stage3", IndexError("none"), ModelError, r"\(dbrx\) does not work with ZeRO-3.*none.*stage below 3"),
        ("stage3", torch.OutOfMemoryError("none left"), torch.OutOfMemoryError, "^none left"),
        ("stage0", RuntimeError("another reason"), RuntimeError, "^another reason"),
    ],
)
def test_only_weights_that_are_not_found_are_attributed_to_zero3(
    stage: str, error: Exception, raised: type[Exception], said: str
) -> None:
    def failing(*args: Any) -> None:
        raise error

    with pytest.raises(raised, match=said):
        built("dbrx", stage, leaves=False, task=replace(CAUSAL_LM, check_scorer=failing))
