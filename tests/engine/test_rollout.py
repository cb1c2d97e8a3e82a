"""Rollouts from a real engine: samples, results, and a clean state afterwards."""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from support.drivers.rollout import PROMPTS, FailsAt, drawn, failing_rollout, policy_engine, sampling, train, whole
from support.flash_attention import flash_attention
from support.helpers import make_model
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.initialization import resolve_continuous_batching_config

from alignment.config.errors import OptionError
from alignment.data.batching import collate
from alignment.engines import memory as device_memory
from alignment.engines.scoring import PolicyEngine
from alignment.rollout import memory
from alignment.rollout.backend import Completion, Generation, RolloutRequest, Work
from alignment.rollout.continuous import ContinuousBackend, _sizes
from alignment.rollout.engine import RolloutEngine

BOTH = pytest.mark.parametrize("backend", ["generate", "continuous"])
Answers = list[list[Completion]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "untied")


@pytest.fixture(scope="module")
def policy(model: str) -> Any:
    """A policy at stage 0 whose weights no test changes."""
    made = policy_engine(model, "stage0")
    yield made
    made.close()


def rollout(policy: PolicyEngine, backend: str = "generate", seed: int = 5, **more: Any) -> Answers:
    """Two completions of each prompt; other arguments belong to the engine, the request, or the sampling."""
    engine = {key: more.pop(key) for key in ("gather", "batch_size") if key in more}
    prompts = more.pop("prompts", PROMPTS)
    made = RolloutEngine(policy, backend, longest_context=64, **engine)
    return made.generate(RolloutRequest(prompts, 2, sampling(**more), seed))


def rows(answers: Answers) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of every completion."""
    return [
        (prompt, list(one.ids)) for prompt, completions in zip(PROMPTS, answers, strict=True) for one in completions
    ]


@BOTH
@pytest.mark.parametrize("cut", [{}, {"temperature": 0.7, "top_k": 5, "min_p": 0.6}], ids=["plain", "processed"])
def test_tokens_are_drawn_with_the_probabilities_of_the_train_phase(
    policy: PolicyEngine, backend: str, cut: dict[str, Any]
) -> None:
    with drawn() as draws:
        answers = rollout(policy, backend, max_new_tokens=24, **cut)
    narrowed = 0
    for prompt, completion in rows(answers):
        with policy.inference():
            scores = policy.scorer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        if cut:
            scores /= 0.7
            kept = scores >= scores.topk(5).values[:, -1:]
            kept &= scores.softmax(-1).mul(kept) >= 0.6 * scores.softmax(-1).max(-1, keepdim=True).values
            narrowed += int((kept.sum(-1) < 5).sum())
            scores = scores.masked_fill(~kept, -torch.inf)
        expected = scores.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        for token, logp in zip(completion, expected.tolist(), strict=True):
            assert min(abs(logp - drawn_with) for other, drawn_with in draws if other == token) < 1e-5
    assert narrowed or not cut, "min_p cuts nothing that top_k has left"


@BOTH
def test_a_request_is_reproducible_and_changes_no_other_randomness(policy: PolicyEngine, backend: str) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    first = rollout(policy, backend, batch_size=4)
    random.random(), numpy.random.rand(), torch.rand(3)
    moved = states()
    assert rollout(policy, backend, batch_size=4) == first
    assert rollout(policy, backend, seed=6, batch_size=4) != first
    assert states() == moved != before
    failing_rollout(policy, 1, RolloutEngine(policy, backend, longest_context=64))
    assert states() == moved
    # Equal prompts in different chunks are sampled independently.
    drawn = rollout(policy, backend, prompts=[[0, 5]] * 4, batch_size=2)
    assert len({one.ids for completions in drawn for one in completions}) == 8


@BOTH
def test_completions_are_in_the_order_of_the_prompts(policy: PolicyEngine, backend: str) -> None:
    # Each prompt's last token determines the next one, at such a low temperature.
    greedy = {}
    with policy.inference():
        for place, prompt in enumerate(PROMPTS):
            greedy[place] = int(policy.scorer.model(torch.tensor([prompt])).logits[0, -1].argmax())
    answers = rollout(policy, backend, batch_size=3, temperature=1e-3)
    assert {place: {one.ids[0] for one in both} for place, both in enumerate(answers)} == {
        place: {token} for place, token in greedy.items()
    }
    assert len(set(greedy.values())) == 3  # the last prompt has that of the first one


@BOTH
def test_the_checkpoints_generation_config_is_ignored(policy: PolicyEngine, backend: str) -> None:
    plain = rollout(policy, backend)
    cuts = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "typical_p": 0.1, "do_sample": False}
    leaking = GenerationConfig(max_length=5, no_repeat_ngram_size=1, **cuts)
    with mock.patch.object(policy.scorer.model, "generation_config", leaking):
        assert rollout(policy, backend) == plain
        assert policy.scorer.model.generation_config is leaking


@pytest.fixture
def thawed() -> Iterator[None]:
    """Collect garbage as in a user's process: conftest.py hides the libraries from the collector."""
    gc.unfreeze()
    yield
    gc.freeze()


@BOTH
def test_the_engine_is_restored_on_any_exit(policy: PolicyEngine, backend: str, thawed: None) -> None:
    model, logger = policy.scorer.model, logging.getLogger("ContinuousBatchingLogger")
    own, attention, level = model.generation_config, model.config._attn_implementation, logger.level

    def check() -> None:
        assert policy.engine.module.training and all(module.training for module in model.modules())
        assert model.generation_config is own and model.config._attn_implementation == attention
        assert logger.level == level and gc.get_freeze_count() == 0
        gc.collect()
        # By type: isinstance() queries the class of objects, and some import modules then.
        alive = [one for one in gc.get_objects() if type(one) in (DynamicCache, PagedAttentionCache)]
        assert alive == []

    rollout(policy, backend)
    check()
    failing_rollout(policy, 1, RolloutEngine(policy, backend, longest_context=64))
    check()


def test_the_cache_is_used_with_activation_checkpointing(policy: PolicyEngine) -> None:
    model, widths = policy.scorer.model, []
    expected = rollout(policy, eos_token_ids=())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        # A layer that recomputes its activations neither fills nor reads the cache.
        assert rollout(policy, eos_token_ids=()) == expected
    finally:
        hook.remove()
        model.gradient_checkpointing_disable()
        model.config.use_cache = True
    assert widths == [max(map(len, PROMPTS))] + [1] * 7


@pytest.mark.parametrize("stage", ["stage3", pytest.param("stage3-offload", marks=pytest.mark.ci)])
def test_training_after_rollouts_is_what_it_would_have_been(model: str, stage: str) -> None:
    def between(policy: PolicyEngine, step: int, backend: str, gather: bool, fails: bool) -> None:
        engine = RolloutEngine(policy, backend, gather=gather, longest_context=64)
        if fails:
            failing_rollout(policy, step, engine)
        else:
            engine.generate(RolloutRequest(PROMPTS[:2], 2, sampling(), step))
        assert whole(policy) == []

    plain = train(model, stage)
    cases = [("generate", True, False), ("generate", False, True), ("continuous", True, True)]
    if stage == "stage3":
        cases += [("generate", True, True), ("generate", False, False), ("continuous", True, False)]
    for backend, gather, fails in cases:
        trained = train(model, stage, partial(between, backend=backend, gather=gather, fails=fails))
        assert all(torch.equal(trained[name], weight) for name, weight in plain.items()), (backend, gather, fails)


def test_location_of_the_weights_during_generation(model: str) -> None:
    policy = policy_engine(model, "stage3")
    coordinator = policy.engine.optimizer.parameter_offload.get_param_coordinator()
    seen: list[tuple[bool, bool]] = []
    policy.scorer.model.model.layers[0].register_forward_hook(
        lambda *_: seen.append((memory.weight_bytes(policy.scorer) == 0, coordinator.is_complete_trace()))
    )
    rollout(policy, gather=True, eos_token_ids=())
    assert [all_whole for all_whole, _ in seen] == [True] * 8
    seen.clear()
    rollout(policy, gather=False, eos_token_ids=())
    # From the second token on, DeepSpeed knows the order of the layers, and prefetches.
    assert seen == [(False, False)] + [(False, True)] * 7
    policy.close()


@pytest.mark.parametrize("gather", [True, False])
def test_weights_kept_by_an_earlier_pass_are_released(model: str, gather: bool) -> None:
    policy = policy_engine(model, "stage3")
    batch = collate([([0, 5, 9], [3, 40, 8, 1])], 4)
    for _ in range(3):
        policy.backward(-policy.forward(batch).scores.mean(), last=True)
        policy.step()
    with policy.inference():
        policy.forward(batch)
    assert whole(policy) != []  # for a backward pass that does not follow
    rollout(policy, gather=gather)
    assert whole(policy) == []
    policy.close()


def test_stages_and_ways_of_gathering_give_the_same_samples(policy: PolicyEngine, model: str) -> None:
    expected = rollout(policy)
    other = policy_engine(model, "stage3-offload")
    assert rollout(other, gather=True) == rollout(other, gather=False) == expected
    with pytest.raises(OptionError, match="^rollout_backend='continuous'"):
        rollout(other, "continuous", gather=False)
    other.close()


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Its load-balancing loss, enabled in the checkpoint, cannot be computed with a cache."""
    experts = policy_engine(make_model(tmp_path, "moe"), "stage0")
    assert all(one.ids for completions in rollout(experts) for one in completions)
    assert experts.scorer.model.config.output_router_logits is True
    experts.close()


def test_available_memory_is_measured(policy: PolicyEngine, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = policy.scorer.model.config
    each = memory.completion_bytes(policy.scorer.model.config, policy.scorer.model.dtype.itemsize, 100)
    # 2 layers of 2 key-value heads of 8 each; one layer's activations; six vectors of the vocabulary. All in fp32.
    assert each == 100 * 4 * (2 * 2 * 2 * 8 + 6 * 32 + 3 * 48) + 6 * 4 * config.vocab_size
    divided = policy_engine(model, "stage3")
    weights = memory.weight_bytes(divided.scorer)
    assert weights == 4 * AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert memory.weight_bytes(policy.scorer) == 0

    def room(free: float, batch_size: int | None = None, gather: bool | None = None) -> tuple[bool, int]:
        monkeypatch.setattr(memory, "free_bytes", lambda where: int(free / 0.8) + 1)
        found = memory.measure_room(divided.scorer.model, 100, gather=gather, batch_size=batch_size, generations=2)
        return found.gather, found.batch_size

    assert room(weights + 2 * each) == (True, 2)
    assert room(weights + 9 * each) == (True, 8)
    assert room(weights + 7.9 * each) == (True, 4) and weights > 0.1 * each, "beside the weights"
    assert room(weights + 1.9 * each) == (False, 1 << int((weights + 1.9 * each) // each).bit_length() - 1)
    assert room(weights + 2 * each, batch_size=3) == (False, 3)
    assert room(0, gather=True) == (True, 1)
    assert room(2**40, gather=False, batch_size=7) == (False, 7)
    divided.close()


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for ranks_here, share in ((None, 1000), ("1", 1000), ("4", 250)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks_here is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
        assert device_memory.free_bytes(torch.device("cpu")) == share


def test_errors(policy: PolicyEngine) -> None:
    hook = policy.scorer.model.model.layers[0].register_forward_hook(FailsAt(2))
    with pytest.raises(ValueError, match="a layer failed.*rollout_batch_size"):
        rollout(policy, "continuous")
    hook.remove()


# FlashAttention: plain torch replaces its functions, with the kernels' restrictions ----------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_tokens_are_decoded_from_pages_that_the_kernel_supports(policy: Any, version: int) -> None:
    with drawn() as draws:
        expected = rollout(policy, "continuous")
    with flash_attention(policy.scorer.model, version) as calls, drawn() as own:
        assert rollout(policy, "continuous") == expected
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
    plain = memory.completion_bytes(model.config, model.dtype.itemsize, 100)
    assert (
        memory.completion_bytes(model.config, model.dtype.itemsize, 100, page=256) - plain == (512 - 100) * heads * 4
    )
    assert (
        memory.completion_bytes(model.config, model.dtype.itemsize, 300, page=256)
        - memory.completion_bytes(model.config, model.dtype.itemsize, 300)
        == (768 - 300) * 256
    )
    made: dict[str, int] = {}

    def measured(*_: Any, **asked: Any) -> memory.Room:
        made.update(asked)
        return memory.Room(True, 4)

    with pytest.MonkeyPatch.context() as patched, flash_attention(model, 2):
        patched.setattr("alignment.rollout.engine.measure_room", measured)
        rollout(policy, "continuous")
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
    together = rollout(policy, "continuous", batch_size=2)
    assert len(managers) == len(PROMPTS) and len(set(managers)) == len(set(processors)) == 1
    assert not hasattr(policy.scorer.model, "_cached_continuous_batching_manager")
    session = ContinuousBackend.session  # of each chunk, as if chunks came from different rollouts:
    patched = lambda backend, parts, generation: session(backend, [] if len(parts) > 1 else parts, generation)  # noqa: E731
    monkeypatch.setattr(ContinuousBackend, "session", patched)
    managers.clear()
    apart = rollout(policy, "continuous", batch_size=2)
    assert len(managers) == len(PROMPTS) and apart == together
