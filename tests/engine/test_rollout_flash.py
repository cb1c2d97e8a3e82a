"""Continuous batching with FlashAttention: plain torch replaces its functions, with the kernels' restrictions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from drivers.rollout import PROMPTS, drawn, policy_engine, sampling
from flash_attention import flash_attention
from helpers import make_model
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.initialization import resolve_continuous_batching_config

from alignment.rollout import memory
from alignment.rollout.backend import Generation, RolloutRequest, Work
from alignment.rollout.continuous import ContinuousBackend, _sizes
from alignment.rollout.engine import RolloutEngine


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = policy_engine(make_model(tmp_path_factory.mktemp("model"), "untied"), "stage0")
    yield made
    made.close()


def rollout(policy: Any, **engine: Any) -> Any:
    made = RolloutEngine(policy, "continuous", longest_context=64, **engine)
    return made.generate(RolloutRequest(PROMPTS, 2, sampling(), 5))


@pytest.mark.parametrize("version", [2, 3])
def test_tokens_are_decoded_from_pages_that_the_kernel_supports(policy: Any, version: int) -> None:
    with drawn() as draws:
        expected = rollout(policy)
    with flash_attention(policy.scorer.model, version) as calls, drawn() as own:
        assert rollout(policy) == expected
    assert calls.varlen and len(calls.decoded) > len(PROMPTS), "decoded the slow way"
    assert torch.tensor(own) == pytest.approx(torch.tensor(draws), abs=1e-5)


@pytest.mark.parametrize(("version", "page"), [(2, 256), (3, 32), (None, 32)])
@pytest.mark.parametrize("longest", [20, 3000])
def test_sizes_of_transformers_cache(policy: Any, version: int | None, page: int, longest: int) -> None:
    """Block tables as long as the longest sequence, so that its pages are used, and space for all sequences."""
    model, new = policy.scorer.model, 7
    parts = [[Work(0, [3] * longest, 2)], [Work(1, [3] * 5, 1), Work(2, [3], 4)]]
    generation = Generation(model, sampling(max_new_tokens=new), torch.device("cpu"))

    def resolved() -> Any:
        assert ContinuousBackend().page_tokens(model) == page
        sizes = _sizes(parts, generation, page)
        return resolve_continuous_batching_config(
            model.config, sizes, None, has_logit_processors=False, device=torch.device("cpu")
        )

    if version is None:
        assert resolved().max_blocks_per_request == 0
        return
    with flash_attention(model, version):
        found = resolved()
    assert found.page_size == page and found.max_requests_per_batch == 5
    assert longest + new <= found.max_blocks_per_request * page < longest + new + 2 * page
    assert found.num_blocks >= max(2 * math.ceil((longest + new) / page), 5 * math.ceil((5 + new) / page))


def test_whole_pages_are_counted(policy: Any) -> None:
    """A page is allocated entirely, however few tokens it contains."""
    model, heads = policy.scorer.model, 2 * 2 * 2 * 8  # layers, keys and values, heads, their width
    plain = memory.completion_bytes(model, 100)
    assert memory.completion_bytes(model, 100, page=256) - plain == (512 - 100) * heads * 4
    assert memory.completion_bytes(model, 300, page=256) - memory.completion_bytes(model, 300) == (768 - 300) * 256
    made: dict[str, int] = {}

    def measured(*_: Any, **asked: Any) -> memory.Room:
        made.update(asked)
        return memory.Room(True, 4)

    with pytest.MonkeyPatch.context() as patched, flash_attention(model, 2):
        patched.setattr("alignment.rollout.engine.measure_room", measured)
        rollout(policy)
    assert made["page"] == 256


def test_one_manager_serves_all_chunks_of_a_rollout(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs belong to the manager of the first chunk; the completions are those of separate managers."""
    managers, processors = [], []
    make = ContinuousBatchingManager._create_batch_processor

    def noted(manager: Any) -> Any:
        managers.append(id(manager))
        processors.append(id(made := make(manager)))
        return made

    monkeypatch.setattr(ContinuousBatchingManager, "_create_batch_processor", noted)
    together = rollout(policy, batch_size=2)
    assert len(managers) == len(PROMPTS) and len(set(managers)) == len(set(processors)) == 1
    assert not hasattr(policy.scorer.model, "_cached_continuous_batching_manager")
    monkeypatch.setattr(ContinuousBackend, "session", session_of_each_chunk(ContinuousBackend.session))
    managers.clear()
    apart = rollout(policy, batch_size=2)
    assert len(managers) == len(PROMPTS) and apart == together


def session_of_each_chunk(session: Any) -> Any:
    """A session that begins with each chunk, as if chunks came from different rollouts."""

    def opened(backend: ContinuousBackend, parts: Any, generation: Generation) -> Any:
        return session(backend, [] if len(parts) > 1 else parts, generation)

    return opened
