"""Assumptions of `alignment.internals.transformers_batching`, with a tiny model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.flash_attention import flash_attention
from support.helpers import tiny_config
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from alignment.internals import transformers_batching as internals


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("untied"), attn_implementation="sdpa").eval()


def manager(model: Any, page: int = 32, blocks: int = 0) -> Any:
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=2)
    sizes = {"num_blocks": 16, "max_batch_tokens": 64, "max_memory_percent": 1.0}
    config = ContinuousBatchingConfig(page_size=page, max_blocks_per_request=blocks, **sizes)
    return model.init_continuous_batching(generation, config)


def answer(made: Any, name: str) -> list[int]:
    """The tokens that a manager generates for a prompt added before its start."""
    assert made.add_request([0, 5, 9, 11], request_id=name) == name
    made.start()
    result = made.get_result(timeout=20)
    assert result is not None and result.request_id == name, result
    assert result.error is None, result.error
    return list(result.generated_tokens)


def live_caches() -> list[int]:
    """All existing caches; checked by type, because some objects import modules when their class is accessed."""
    gc.collect()
    return [id(one) for one in gc.get_objects() if type(one) is PagedAttentionCache]


@pytest.mark.parametrize(("version", "page"), [(2, 256), (2, 32), (3, 32)])
def test_kernels_that_decode_from_pages_by_any_name(model: Any, version: int, page: int) -> None:
    config = tiny_config("tied")
    for name in ("sdpa", "eager", "flex_attention", "flash_attention_4"):
        config._attn_implementation = name
        assert not internals.decodes_from_pages(config)
    for name in (f"flash_attention_{version}", f"kernels-community/flash-attn{version}"):
        config._attn_implementation = name
        assert internals.decodes_from_pages(config) and internals.decodes_from_pages(config, version)
        assert not internals.decodes_from_pages(config, 5 - version)
    # The first token is that of the prefill; with unsupported pages there is no second one.
    with flash_attention(model, version) as calls:
        made = manager(model, page, 2)
        try:
            made.add_request([0, 5, 9, 11], request_id="0")
            made.start()
            result = made.get_result(timeout=20)
        finally:
            made.stop(block=True, hard_stop=True)
            internals.forget_manager(model, made)
    assert (result.error is None) == bool(calls.decoded) == (version == 3 or page == 256)
    assert result.error is None or "divisible by 256" in result.error


def test_a_stopped_manager_generates_again_with_the_same_cache(model: Any) -> None:
    made = manager(model)
    try:
        first, caches = answer(made, "0"), live_caches()
        internals.stop_keeping_graphs(made)
        assert not made.is_running()
        assert answer(made, "1") == first and live_caches() == caches and len(caches) == 1
    finally:
        made.stop(block=True, hard_stop=True)
        internals.forget_manager(model, made)


def test_the_cache_of_a_manager_that_was_kept_is_released(model: Any) -> None:
    made = manager(model)
    answer(made, "0")
    internals.stop_keeping_graphs(made)
    assert len(live_caches()) == 1
    internals.forget_manager(model, made)
    assert not live_caches() and all("batching" not in name for name in vars(model))
