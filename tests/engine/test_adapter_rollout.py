"""Rollouts from a policy with adapters, with both backends, gathered and by layer, and what they leave behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.drivers.rollout import PROMPTS, below_the_likeliest, sampling, train, whole
from support.oracle.adapters import quantization
from transformers import PreTrainedModel

from alignment.engines.scoring import PolicyEngine
from alignment.internals.peft import computing_with
from alignment.models.adapters.injection import inject, keep_given
from alignment.models.adapters.record import Adapters
from alignment.models.quantization import Quantization
from alignment.rollout.backend import Completion, RolloutRequest
from alignment.rollout.engine import RolloutEngine

# Backend, and whether weights are gathered for the entire rollout.
WAYS = [("generate", True), ("continuous", True), ("generate", False)]

pytestmark = pytest.mark.ci


def adapted(kind: str, model: PreTrainedModel, ds_config: dict[str, Any]) -> None:
    """Random adapters, A and B, and a frozen copy that must not be active."""
    config = LoraConfig(
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        modules_to_save=["lm_head"] if kind == "saved" else None,
        use_dora=kind == "dora",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    inject(model, Adapters(config), ds_config=ds_config, dtype=torch.float32, seed=3)
    keep_given(model, Adapters(config), ds_config=ds_config, dtype=torch.float32)


def arguments(kind: str) -> dict[str, Any]:
    """The arguments of ``policy_engine`` for a kind of adapters."""
    loaded = {"quantization": Quantization(quantization(4)), "device": torch.device("cpu")} if kind == "qlora" else {}
    return {"adapted": partial(adapted, kind), **loaded}


def answers_of(policy: PolicyEngine, backend: str, gather: bool, seed: int) -> list[list[Completion]]:
    """Return two greedy completions of each prompt."""
    rollout = RolloutEngine(policy, backend, gather=gather, longest_context=64)
    return rollout.generate(RolloutRequest(PROMPTS, 2, sampling(max_new_tokens=12, top_k=1), seed))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("saved", "stage3"), ("qlora", "stage2")]
    + [
        pytest.param(kind, stage, marks=pytest.mark.slow)
        for kind, stage in (("qlora", "stage3"), ("dora", "stage3"), ("saved", "stage3-offload"), ("dora", "stage0"))
    ],
)
def test_they_use_the_policys_adapters_and_leave_nothing_behind(base: str, kind: str, stage: str) -> None:
    """Their tokens are the likeliest of the trained policy; training after them is bitwise unchanged."""

    def between(policy: PolicyEngine, step: int, backend: str, gather: bool) -> None:
        answers = answers_of(policy, backend, gather, step)
        assert whole(policy) == []
        made = [(prompt, one) for prompt, each in zip(PROMPTS, answers, strict=True) for one in each]
        with policy.inference():
            assert max(below_the_likeliest(policy, prompt, one.ids) for prompt, one in made) <= 1e-4
            with computing_with(policy.scorer, None):
                assert max(below_the_likeliest(policy, prompt, one.ids) for prompt, one in made) > 0.1

    plain = train(base, stage, steps=2, **arguments(kind))
    for backend, gather in WAYS if stage.startswith("stage3") else WAYS[:2]:
        asked = partial(between, backend=backend, gather=gather)
        trained = train(base, stage, asked, steps=2, **arguments(kind))
        assert trained.keys() == plain.keys()
        assert all(torch.equal(trained[name], weight) for name, weight in plain.items()), (backend, gather)
