"""The policy's weights in a real vLLM server: what it computes with them, and what stays old if a step is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.drivers.rollout import SEQUENCES, policy_engine
from support.vllm_server import TARGETS, RealServer, body, differences
from transformers import PreTrainedModel

from alignment.data.batching import collate
from alignment.engines.scoring import PolicyEngine
from alignment.models.adapters.injection import inject
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource, read_config
from alignment.rollout.vllm.client import Choice, Client
from alignment.rollout.vllm.weights import WeightSync

pytestmark = [pytest.mark.vllm, pytest.mark.ci]

PROMPT = [0, *((7 * number) % 60 + 4 for number in range(20))]
LONG = [0, *((11 * number) % 60 + 4 for number in range(200))]
EXACT = 1e-4  # the largest mean difference in fp32
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"k_proj": 32}},
    "some layers": {"layers_to_transform": [1]},
}


def lora(**settings: Any) -> Adapters:
    """Adapters whose initial weights already change the model."""
    given = {"r": 4, "lora_alpha": 16, "init_lora_weights": False, "target_modules": TARGETS, **settings}
    return Adapters(LoraConfig(**given, task_type="CAUSAL_LM"))


def injected(adapters: Adapters, model: PreTrainedModel, ds_config: dict[str, Any]) -> None:
    inject(model, adapters, ds_config=ds_config, dtype=torch.float32, seed=3)


@contextlib.contextmanager
def synced(
    server: RealServer, adapters: Adapters | None, folder: Path | None = None
) -> Iterator[tuple[PolicyEngine, WeightSync, Client]]:
    """A policy, and what sends its weights."""
    policy = policy_engine(server.model, "stage0", adapted=None if adapters is None else partial(injected, adapters))
    client = server.client()
    config = read_config(server.model, key="model", trust_remote_code=False)
    source = ModelSource(server.model, None, config, {})
    sync = WeightSync(client, policy, adapters, source, folder, base_name=client.info().model)
    try:
        yield policy, sync, client
    finally:
        sync.close()
        client.close()
        policy.close()


def step(policy: PolicyEngine) -> None:
    """A step that is large enough to change every log-prob."""
    for number in range(2):
        policy.backward(-4 * policy.forward(collate(SEQUENCES[number], 20)).scores.mean(), last=number == 1)
    policy.step()


def choices(client: Client, model: str, salt: str, prompt: Sequence[int] = PROMPT) -> list[Choice]:
    (found,) = client.generate([body(prompt, model, salt)])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_effect_that_peft_gives_them(vllm_server: RealServer, kind: str) -> None:
    adapters = lora(**KINDS[kind])
    with synced(vllm_server, adapters) as (policy, sync, client):
        first = choices(client, sync.update("run-0"), "run-0")
        assert differences(policy, PROMPT, first).mean() <= EXACT
        assert {choice.versions for choice in first} == {("run-0",)}
        base = choices(client, client.info().model, "run-0")
        assert differences(policy, PROMPT, base).mean() > 100 * EXACT, "the adapters do nothing"
        step(policy)
        assert differences(policy, PROMPT, choices(client, "run-0", "run-0")).mean() > 100 * EXACT, "a stale adapter"
        second = choices(client, sync.update("run-1"), "run-1")
        assert differences(policy, PROMPT, second).mean() <= EXACT
        assert {choice.versions for choice in second} == {("run-1",)}


def test_all_weights_are_replaced(vllm_server: RealServer) -> None:
    with synced(vllm_server, None) as (policy, sync, client):
        name = sync.update("run-0")
        assert differences(policy, PROMPT, choices(client, name, "run-0")).mean() <= EXACT
        step(policy)
        assert differences(policy, PROMPT, choices(client, name, "run-0")).mean() > 100 * EXACT, "stale weights"
        second = choices(client, sync.update("run-1"), "run-1")
        assert differences(policy, PROMPT, second).mean() <= EXACT
        assert {choice.versions for choice in second} == {("run-1",)}
        assert client.state()[0] == "run-1"


@pytest.mark.parametrize("kept", ["nothing", "pause", "reset_prefix_cache", "salt"])
def test_a_long_prompt_that_the_server_has_cached(
    vllm_server: RealServer, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are those of the old weights. A pause, a reset of the cache and the salt exclude them."""
    with synced(vllm_server, None) as (policy, sync, client):
        choices(client, sync.update("run-0"), "run-0", LONG)
        step(policy)
        for name in {"pause", "reset_prefix_cache"} - {kept}:
            monkeypatch.setattr(Client, name, lambda self: None)
        salt = "run-1" if kept == "salt" else "run-0"
        difference = differences(policy, LONG, choices(client, sync.update("run-1"), salt, LONG)).mean()
        assert difference > 100 * EXACT if kept == "nothing" else difference <= EXACT


def test_the_first_tokens_are_distributed_as_the_policys_softmax(vllm_server: RealServer) -> None:
    """Before and after an update; the old adapter is noticed."""
    with synced(vllm_server, lora()) as (policy, sync, client):
        for version in ("run-0", "run-1"):
            name = sync.update(version)
            assert fit(policy, client, name, version) > 0.001
            step(policy)
        assert fit(policy, client, name, version) < 1e-6, "the policy has made a step"


def fit(policy: PolicyEngine, client: Client, name: str, version: str, number: int = 2000) -> float:
    """The p-value of first tokens: chi-squared over the 20 likeliest tokens and the rest."""
    bodies = [body(PROMPT, name, version, n=50, max_tokens=1, seed=50 * each) for each in range(number // 50)]
    tokens = torch.tensor([choice.ids[0] for group in client.generate(bodies) for choice in group])
    with policy.inference():
        expected = policy.scorer.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1) * number
    likeliest = expected.topk(20).indices
    seen = torch.bincount(tokens, minlength=len(expected)).double()
    both = [torch.cat([each[likeliest], (number - each[likeliest].sum())[None]]) for each in (seen, expected)]
    statistic = ((both[0] - both[1]) ** 2 / both[1]).sum()
    return float(torch.special.gammaincc(torch.full_like(statistic, 20 / 2), statistic / 2))


def test_versions_and_names_are_used_once(vllm_server: RealServer) -> None:
    """vLLM takes cached keys and values for those of an adapter that has the same name and path."""
    with synced(vllm_server, lora()) as (policy, sync, client):
        first = sync.update("run-0")
        choices(client, first, "run-0", LONG)
        (folder,) = (path for path in Path("/dev/shm").glob("alignment-vllm-*/run-0"))
        client.unload_adapter(first)
        step(policy)
        sync.update("run-1")
        (newer,) = folder.parent.glob("run-*")
        newer.rename(folder)
        client.load_adapter(first, folder)
        assert differences(policy, LONG, choices(client, first, "run-0", LONG)).mean() > 100 * EXACT
        assert differences(policy, LONG, choices(client, first, "another", LONG)).mean() <= EXACT
        folder.rename(newer)
        client.unload_adapter(first)
