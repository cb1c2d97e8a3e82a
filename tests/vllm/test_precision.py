"""A real vLLM server in bf16, one whose model has tied embeddings, and what servers reject or compute otherwise."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.drivers.rollout import policy_engine
from support.vllm_runs import make
from support.vllm_server import TARGETS, RealServer, body, differences, make_served
from transformers import AutoModelForCausalLM

from alignment.config.errors import TrainingError
from alignment.models.adapters.record import Adapters
from alignment.rollout.vllm.rollout import DIFFERENCE
from alignment.rollout.vllm.support import adapter_obstacle

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("own_process_group")]


@pytest.mark.slow
def test_log_probs_in_16_bits(served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute in bf16, and round at other places."""
    with contextlib.closing(RealServer(served, tmp_path / "server", "bfloat16")) as server:
        monkeypatch.setenv("VLLM_API_KEY", server.key)
        policy = policy_engine(served, "stage0", dtype=torch.bfloat16, further={"bf16": {"enabled": True}})
        with contextlib.closing(server.client()) as client:
            prompts = [[0, *((seed * number) % 60 + 4 for number in range(20))] for seed in range(1, 25)]
            groups = client.generate([body(prompt, client.info().model, "none") for prompt in prompts])
        found = torch.cat([differences(policy, prompt, group) for prompt, group in zip(prompts, groups)])
        policy.close()
        print(f"mean {found.mean():.2e}, largest {found.max():.2e} of {len(found)}")
        assert found.mean() <= 2e-2 and found.max() <= 0.2
        trainer = make(server.url, served, tmp_path, bf16=True, vllm_server_timeout=60.0)
        with contextlib.closing(trainer):
            trainer.train()
        logged = [entry[DIFFERENCE] for entry in trainer.state.log_history if DIFFERENCE in entry]
        assert len(logged) == 3 and max(logged) <= 2e-2


@pytest.mark.slow
def test_a_head_that_stays_old_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, vLLM computes with a copy of tied embeddings as its head, which a reload does not replace."""
    model = make_served(tmp_path / "model", tied=True)
    with contextlib.closing(RealServer(model, tmp_path / "server")) as server:
        monkeypatch.setenv("VLLM_API_KEY", server.key)
        trainer = make(server.url, model, tmp_path, vllm_server_timeout=60.0)
        with contextlib.closing(trainer), pytest.raises(TrainingError, match=DIFFERENCE):
            trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.ci
def test_what_is_refused_is_what_a_server_rejects(vllm_server: RealServer, tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "accepted": {},
        "dora": {"use_dora": True},
        "lora_bias": {"lora_bias": True},
        "bias": {"bias": "lora_only"},
        "saved": {"modules_to_save": ["lm_head"]},
        "tokens": {"trainable_token_indices": [5]},
    }
    with contextlib.closing(vllm_server.client(timeout=0.5)) as client:
        for name, more in settings.items():
            config = LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", **more)
            get_peft_model(AutoModelForCausalLM.from_pretrained(vllm_server.model), config).save_pretrained(
                tmp_path / name
            )
            refused = adapter_obstacle(Adapters(config)) is not None
            assert refused is (name != "accepted")
            with pytest.raises(TrainingError) if refused else contextlib.nullcontext():
                client.load_adapter(name, tmp_path / name)
        client.unload_adapter("accepted")
