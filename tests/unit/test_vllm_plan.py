"""The memory plan of a run whose completions come from vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from alignment.config.dtypes import Machine, planning_for
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.models.source import ModelSource
from alignment.planning.changes import possible
from alignment.planning.engines import plan_engines
from alignment.planning.plan import MemoryPlan
from alignment.planning.planner import Planner

pytestmark = pytest.mark.usefixtures("own_process_group")
CARD = 24e9
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
MODEL = ModelSource("model", None, LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **SIZES), {})
NUMEL = 2 * 512 * 256 + 2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256) + 256
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}
PART = "vLLM server"


def planned(**options: Any) -> MemoryPlan:
    given = OnlineDPOConfig("out", max_length=128, **options)
    with planning_for(Machine(1, cuda=True, card=CARD)):
        return Planner(given, plan_engines(given, MODEL, None), 1, card=CARD).plan(brief=True)


def test_a_server_on_the_same_gpu_sleeps_except_in_rollouts() -> None:
    gpu = planned(**COLOCATED).gpu
    assert {name: parts[PART] for name, parts in gpu.items()} == {
        name: 0.55 * CARD if name == "rollout" else 600e6 for name in gpu
    }
    assert "KV cache" in planned().gpu["rollout"] and "KV cache" not in gpu["rollout"]
    gpu = planned(**COLOCATED, vllm_enable_sleep_mode=False, vllm_gpu_memory_utilization=0.3).gpu
    assert {parts[PART] for parts in gpu.values()} == {0.3 * CARD}


def test_what_a_server_keeps_in_host_memory() -> None:
    """With adapters, the base weights while it sleeps; full weights are sent again."""
    for adapted in (True, False):
        host = planned(**COLOCATED, use_peft=adapted).host
        assert host["train"][PART] - host["rollout"][PART] == (2 * NUMEL if adapted else 0)
        assert (host["rollout"]["sent weights"] == 2 * NUMEL) == (not adapted)
    found = planned(use_vllm=True)
    assert not any(PART in parts for parts in (*found.gpu.values(), *found.host.values()))


def test_changes_that_have_an_effect() -> None:
    def changed(**options: Any) -> set[str]:
        found = possible(OnlineDPOConfig("out", **options), 2, 1, adapters=True)
        return {name for change in found for name in change.options}

    assert "rollout_batch_size" in changed() and "rollout_batch_size" not in changed(use_vllm=True)
    assert "vllm_gpu_memory_utilization" in changed(**COLOCATED) - changed(use_vllm=True)
    assert "vllm_gpu_memory_utilization" not in changed(**COLOCATED, vllm_gpu_memory_utilization=0.3)
