"""What `alignment.internals.transformers` relies on, with tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_model, tiny_config, zero
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    MambaConfig,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import deepspeed as hf_deepspeed

from alignment.engines.launch_env import init_distributed
from alignment.internals import transformers as internals
from alignment.internals.transformers import loading

STAGE3 = {"train_micro_batch_size_per_gpu": 1, **zero(3)}
IDS = torch.tensor([[0, 5, 9, 11]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("untied"), attn_implementation="sdpa").eval()


def generate(model: Any, **more: Any) -> list[int]:
    """The tokens that greedy decoding adds to a prompt."""
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2, **more)
    return list(
        model.generate(IDS, attention_mask=torch.ones_like(IDS), generation_config=config)[0, IDS.shape[1] :].tolist()
    )


# The DeepSpeed flag -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_flag() -> Iterator[None]:
    yield
    hf_deepspeed.unset_hf_deepspeed_config()


def flag() -> bool:
    return bool(hf_deepspeed.is_deepspeed_zero3_enabled())


def test_the_flag_lives_for_one_load() -> None:
    assert not flag()
    with loading(STAGE3):
        assert flag()
        with loading(None):
            assert not flag()
        assert flag()
        with loading({"train_micro_batch_size_per_gpu": 1, **zero(2)}):
            assert not flag()
    assert not flag()


def test_the_flag_comes_back_after_an_error() -> None:
    users: Any = hf_deepspeed.HfDeepSpeedConfig(STAGE3)
    with pytest.raises(RuntimeError), loading(None):
        assert not flag()
        raise RuntimeError
    assert flag(), "the user's own configuration is in force again"
    with pytest.raises(AttributeError), loading({"zero_optimization": "not a section"}):
        pass
    assert flag() and hf_deepspeed._hf_deepspeed_config_weak_ref() is users
    del users
    assert not flag()


def test_the_configuration_is_not_written_into() -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with loading(given):
        pass
    assert given == {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def test_a_model_is_partitioned_within_the_flag_alone(tmp_path: Path) -> None:
    init_distributed(use_cpu=True)
    path = make_model(tmp_path)

    def partitioned() -> bool:
        return any(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_pretrained(path).parameters())

    with loading(STAGE3):
        assert partitioned()
        with loading(None):
            assert not partitioned()
    assert not partitioned()


# Models -------------------------------------------------------------------------------------------------------------


def test_what_decays_is_what_decays_under_trainer(model: Any, tmp_path: Path) -> None:
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    own = internals.parameter_names_outside(model, [nn.LayerNorm], patterns)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert sorted(own) == sorted(trainer.get_decay_parameter_names(model))
    assert set(dict(model.named_parameters())) - set(own) == {n for n, _ in model.named_parameters() if "norm" in n}


def test_the_balancing_function_is_the_one_that_the_model_calls() -> None:
    experts = AutoModelForCausalLM.from_config(tiny_config("moe"))
    mask = torch.ones_like(IDS)
    output = experts(IDS, attention_mask=mask, labels=IDS, output_router_logits=True)
    function = internals.load_balancing_function(experts)
    assert function is not None
    assert torch.equal(function(output.router_logits, 4, 2, mask), output.aux_loss)
    assert internals.load_balancing_function(AutoModelForCausalLM.from_config(tiny_config("tied"))) is None


# Logits processors --------------------------------------------------------------------------------------------------


def test_the_processors_are_those_of_a_generation(model: Any) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=3, repetition_penalty=1.5, max_new_tokens=4, eos_token_id=1
    )
    used: list[str] = []

    def note(one: LogitsProcessor) -> LogitsProcessor:
        used.append(type(one).__name__)
        return one

    with internals.changed_processors(model, note):
        model.generate(IDS, generation_config=config)
    found = internals.logits_processors(model, config)
    assert [type(one).__name__ for one in found] == used != []
    neutral = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4)
    assert len(internals.logits_processors(model, neutral)) == 0


def test_a_changed_processor_is_used_in_its_place_and_only_within_the_context(model: Any) -> None:
    class Only(LogitsProcessor):
        """Leaves one token, whatever was there before."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([33]), 0.0)

    plain = generate(model, repetition_penalty=1.5)
    with internals.changed_processors(model, lambda one: Only()):
        assert generate(model, repetition_penalty=1.5) == [33] * 4 != plain
        assert generate(model) != [33] * 4, "where there is no processor, none is added"
    assert generate(model, repetition_penalty=1.5) == plain
    with pytest.raises(ValueError), internals.changed_processors(model, lambda one: Only()):
        raise ValueError
    assert generate(model, repetition_penalty=1.5) == plain


# Continuous batching ------------------------------------------------------------------------------------------------


def test_the_attention_is_what_was_asked_for() -> None:
    for asked in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_config(tiny_config("tied"), attn_implementation=asked)
        assert internals.attention_implementation(model) == asked
    model.set_attn_implementation("eager")
    assert internals.attention_implementation(model) == "eager"
    model.set_attn_implementation("sdpa")
    assert internals.attention_implementation(model) == "sdpa"


@pytest.mark.parametrize(
    ("name", "flash"),
    [
        *(("sdpa", False), ("eager", False), ("flex_attention", False)),
        *(("flash_attention_2", True), ("flash_attention_3", True), ("kernels-community/flash-attn2", True)),
    ],
)
def test_flash_kernels_by_any_name(name: str, flash: bool) -> None:
    config = tiny_config("tied")
    config._attn_implementation = name
    assert internals.is_flash_attention_requested(config) is flash


def manager(model: Any, **more: Any) -> Any:
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=2)
    sizes = {"page_size": 32, "num_blocks": 16, "max_batch_tokens": 64, "max_memory_percent": 1.0}
    return model.init_continuous_batching(generation, ContinuousBatchingConfig(**sizes, **more))


def test_models_with_paged_attention_generate_the_same_in_batches(model: Any) -> None:
    assert internals.supports_paged_attention(model)
    assert internals.paged_cache_obstacle(model.config) is None
    running = manager(model)
    try:
        running.add_request(IDS[0].tolist(), request_id="0")
        running.start()
        result = running.get_result(timeout=60)
        assert internals.generation_error(running) is None
    finally:
        running.stop(block=True, hard_stop=True)
        running.destroy()
    assert result.generated_tokens == generate(model)


def test_a_model_with_a_state_of_its_own_has_no_paged_attention() -> None:
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9))
    assert not internals.supports_paged_attention(mamba)


def test_layers_without_a_paged_cache_are_refused_as_by_a_manager() -> None:
    config = LlamaConfig(**tiny_config("tied").to_diff_dict())
    config.layer_types = ["full_attention", "linear_attention"]
    obstacle = internals.paged_cache_obstacle(config)
    with pytest.raises(ValueError) as refused:
        manager(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())
    assert obstacle == str(refused.value) and "linear_attention" in obstacle


def test_copies_of_a_request_are_returned_under_their_names(model: Any) -> None:
    running = manager(model)
    running.num_return_sequences = 3
    try:
        running.add_request(IDS[0].tolist(), request_id="7")
        running.start()
        found = {running.get_result(timeout=60).request_id for _ in range(3)}
    finally:
        running.stop(block=True, hard_stop=True)
        running.destroy()
    assert found == set(internals.request_names("7", 3)) and len(found) == 3
    assert internals.request_names("7", 1) == ["7"]


def test_the_error_that_ended_the_generating_thread_is_told(model: Any) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a layer failed")

    hook, running = model.model.layers[0].register_forward_hook(fails), manager(model)
    try:
        running.add_request(IDS[0].tolist(), request_id="0")
        running.start()
        while running.is_running() and internals.generation_error(running) is None:
            running.get_result(timeout=0.1)
        assert "a layer failed" in str(internals.generation_error(running))
    finally:
        hook.remove()
        running.stop(block=True, hard_stop=True)
        running.destroy()
