"""Assumptions of `alignment.internals.transformers` and `transformers_batching`, with tiny models."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.flash_attention import flash_attention
from support.helpers import make_model, tiny_config, zero
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ContinuousBatchingConfig,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    MambaConfig,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations import TensorBoardCallback, sdpa_attention
from transformers.integrations import deepspeed as hf_deepspeed

from alignment.engines.launch_env import init_distributed
from alignment.internals import transformers as internals
from alignment.internals import transformers_batching as batching
from alignment.internals.transformers import loading
from alignment.models.attention import PackingCheck

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
    users: Any = hf_deepspeed.HfDeepSpeedConfig(STAGE3)
    with pytest.raises(RuntimeError), loading(None):
        assert not flag()
        raise RuntimeError
    assert flag(), "the user's own configuration is in force again"
    with pytest.raises(AttributeError), loading({"zero_optimization": "not a section"}):
        pass
    assert flag()
    del users
    assert not flag()


def test_a_model_is_partitioned_only_within_the_flag(tmp_path: Path) -> None:
    init_distributed(use_cpu=True)
    path = make_model(tmp_path)

    def partitioned() -> bool:
        return any(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_pretrained(path).parameters())

    with loading(STAGE3):
        assert partitioned()
        with loading(None):
            assert not partitioned()
    assert not partitioned()


def test_weight_decay_applies_to_the_same_parameters_as_in_trainer(model: Any, tmp_path: Path) -> None:
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


def test_dropout_rates_are_those_that_attention_applies() -> None:
    config = tiny_config("untied")
    config.attention_dropout = 0.5
    model = AutoModelForCausalLM.from_config(config).train()
    attention = model.model.layers[0].self_attn
    assert not any(isinstance(part, nn.Dropout) for part in model.modules())
    assert [getattr(attention, name) for name in internals.dropout_rates(attention)] == [0.5]

    def repeats() -> bool:
        return torch.equal(model(IDS).logits, model(IDS).logits)

    assert not repeats()
    for part in model.modules():
        for name in internals.dropout_rates(part):
            setattr(part, name, 0.0)
    assert repeats()


def test_untrusted_code_is_distinguished_from_other_errors(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise RuntimeError('this was run')")
    described = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError) as caught:
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert internals.asks_for_trust(caught.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ValueError) as caught:
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert not internals.asks_for_trust(caught.value)


def test_the_options_of_a_tokenizer_are_those_that_it_saves(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model"), model_max_length=77)
    assert internals.tokenizer_options(tokenizer)["model_max_length"] == 77
    tokenizer.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert saved["model_max_length"] == 77


class Noting(TrainerCallback):
    """Records its arguments and requests a checkpoint."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        self.calls.append(kwargs)
        control.should_save = True
        return control


def test_the_handler_calls_callbacks_as_trainer_does(model: Any, tmp_path: Path) -> None:
    """With the same keywords and instances of classes; `control` is their result."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    state = TrainerState()
    own, of_trainer = Noting(), Noting()
    handler = internals.callback_handler([DefaultFlowCallback, own], "a tokenizer")
    handler.model = model
    control = handler.on_step_end(args, state, TrainerControl())
    assert control.should_save
    trainer = Trainer(model, args, callbacks=[of_trainer])
    trainer.callback_handler.on_step_end(args, state, TrainerControl())
    assert own.calls[0].keys() == of_trainer.calls[0].keys()
    assert own.calls[0]["model"] is model and own.calls[0]["processing_class"] == "a tokenizer"
    assert [type(one) for one in handler.callbacks] == [DefaultFlowCallback, Noting]
    added = Noting()
    handler.add_callback(added)
    assert handler.pop_callback(added) is added


@pytest.mark.parametrize(
    ("part", "keeps"),
    [(EarlyStoppingCallback(), True), (TrainerControl(), True), (DefaultFlowCallback(), False), (Noting(), False)],
    ids=lambda value: type(value).__name__,
)
def test_stateful_objects_are_part_of_trainers_state(part: Any, keeps: bool) -> None:
    assert internals.keeps_state(part) == keeps
    with contextlib.nullcontext() if keeps else pytest.raises(TypeError):
        kept = TrainerState(stateful_callbacks=[part]).stateful_callbacks
        assert kept == {type(part).__name__: part.state()} and {"args", "attributes"} <= part.state().keys()


def test_the_writer_of_tensorboard_is_the_one_that_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    callback, args = TensorBoardCallback(), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert internals.tensorboard_writer(callback) is None
    callback.on_train_begin(args, TrainerState(is_world_process_zero=True), TrainerControl())
    writer = internals.tensorboard_writer(callback)
    writer.add_text("title", "a text that was added")
    writer.flush()
    (file,) = (tmp_path / "runs").rglob("events.*")
    assert b"a text that was added" in file.read_bytes()


def test_the_processors_are_those_of_generate(model: Any) -> None:
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
        """Allows only one token."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([33]), 0.0)

    plain = generate(model, repetition_penalty=1.5)
    with internals.changed_processors(model, lambda one: Only()):
        assert generate(model, repetition_penalty=1.5) == [33] * 4 != plain
        assert generate(model) != [33] * 4, "without a processor, none is added"
    assert generate(model, repetition_penalty=1.5) == plain
    with pytest.raises(ValueError), internals.changed_processors(model, lambda one: Only()):
        raise ValueError
    assert generate(model, repetition_penalty=1.5) == plain


def test_a_processor_receives_the_padding_of_each_row(model: Any) -> None:
    """By `generate`; among all processors that read tokens, only the repetition penalty."""
    padded, seen = torch.cat([torch.full((1, 2), 2), IDS[:, :2]], dim=1), {}

    def note(one: LogitsProcessor) -> LogitsProcessor:
        seen[type(one)] = internals.knows_padding(one)
        return one

    config = GenerationConfig(max_new_tokens=4, pad_token_id=2, repetition_penalty=1.5, no_repeat_ngram_size=2)
    batch = torch.cat([padded, IDS])
    with internals.changed_processors(model, note):
        answers = model.generate(batch, attention_mask=(batch != 2).long(), generation_config=config)
    assert seen[RepetitionPenaltyLogitsProcessor] and sum(seen.values()) == 1 < len(seen)
    penalized = GenerationConfig(max_new_tokens=4, pad_token_id=2, repetition_penalty=1.5)
    answers = model.generate(batch, attention_mask=(batch != 2).long(), generation_config=penalized)
    alone = model.generate(IDS[:, :2], generation_config=penalized)
    assert answers[0, 4:].tolist() == alone[0, 2:].tolist()


def test_the_attention_is_the_requested_one() -> None:
    for asked in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_config(tiny_config("tied"), attn_implementation=asked)
        assert internals.attention_implementation(model) == asked
    model.set_attn_implementation("eager")
    assert internals.attention_implementation(model) == "eager"
    model.set_attn_implementation("sdpa")
    assert internals.attention_implementation(model) == "sdpa"


def manager(model: Any, page_size: int = 32, blocks: int = 0, **more: Any) -> Any:
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=2, **more)
    sizes = {"num_blocks": 16, "max_batch_tokens": 64, "max_memory_percent": 1.0, "max_blocks_per_request": blocks}
    return model.init_continuous_batching(generation, ContinuousBatchingConfig(page_size=page_size, **sizes))


@contextlib.contextmanager
def running(model: Any, **more: Any) -> Iterator[Any]:
    """A manager with one request that is about to generate."""
    made = manager(model, **more)
    try:
        made.add_request(IDS[0].tolist(), request_id="0")
        made.start()
        yield made
    finally:
        made.stop(block=True, hard_stop=True)
        made.destroy()


def test_models_with_paged_attention_generate_the_same_in_batches(model: Any) -> None:
    assert internals.supports_paged_attention(model)
    assert internals.paged_cache_obstacle(model.config) is None
    with running(model) as made:
        result = made.get_result(timeout=60)
        assert internals.generation_error(made) is None
    assert result.generated_tokens == generate(model)


def test_processors_that_need_tokens_are_dropped_by_a_manager(model: Any) -> None:
    """They are marked as such, unlike those that need only scores."""
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    assert not internals.works_in_continuous_batching(penalty)
    assert internals.works_in_continuous_batching(TemperatureLogitsWarper(0.5))
    with running(model, repetition_penalty=0.1) as made:
        result = made.get_result(timeout=60)
    assert result.generated_tokens == generate(model) != generate(model, repetition_penalty=0.1)


def test_a_stateful_model_has_no_paged_attention() -> None:
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9))
    assert not internals.supports_paged_attention(mamba)


def test_layers_without_a_paged_cache_are_rejected_as_by_a_manager() -> None:
    config = LlamaConfig(**tiny_config("tied").to_diff_dict())
    config.layer_types = ["full_attention", "linear_attention"]
    obstacle = internals.paged_cache_obstacle(config)
    with pytest.raises(ValueError) as refused:
        manager(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())
    assert obstacle == str(refused.value) and "linear_attention" in obstacle


def test_copies_of_a_request_are_returned_under_their_names(model: Any) -> None:
    made = manager(model)
    try:
        internals.set_copies(made, 3)
        made.add_request(IDS[0].tolist(), request_id="7")
        internals.set_copies(made, 1)
        made.add_request(IDS[0].tolist(), request_id="8")
        made.start()
        results = [made.get_result(timeout=20) for _ in range(4)]
        found = {result.request_id for result in results if result is not None} - {"8"}
    finally:
        made.stop(block=True, hard_stop=True)
        made.destroy()
    assert found == set(internals.request_names("7", 3)) and len(found) == 3
    assert internals.request_names("7", 1) == ["7"]


def failing(model: Any) -> Exception | None:
    """The error that ended the thread of a manager whose model fails."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a layer failed")

    hook, others = model.model.layers[0].register_forward_hook(fails), threading.enumerate()
    try:
        with running(model) as made:
            while made.is_running() and internals.generation_error(made) is None:
                made.get_result(timeout=0.1)
            return internals.generation_error(made)
    finally:
        hook.remove()
        for thread in set(threading.enumerate()) - set(others):  # it may still be logging
            thread.join(10)


@pytest.mark.parametrize("hushed", [True, False])
def test_the_error_that_ended_the_thread_and_log_messages_of_continuous_batching(model: Any, hushed: bool) -> None:
    messages: list[str] = []
    make = logging.getLogRecordFactory()

    def note(*args: Any, **kwargs: Any) -> logging.LogRecord:  # its logger has its own handler and no parent
        record = make(*args, **kwargs)
        messages.append(record.getMessage())
        return record

    logging.setLogRecordFactory(note)
    try:
        with internals.continuous_batching_hushed() if hushed else contextlib.nullcontext():
            assert "a layer failed" in str(failing(model))
    finally:
        logging.setLogRecordFactory(make)
    assert any("a layer failed" in message for message in messages) != hushed


def test_grouped_keys_are_expanded_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest limit applies, and the hidden states are the same."""
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    model = AutoModelForCausalLM.from_config(tiny_config("tied", layers=1)).eval()
    ids, calls = torch.arange(2 * 9).reshape(2, 9), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Any, key: Any, value: Any, enable_gqa: bool = False, **more: Any) -> Any:
        calls.append((key.shape[1], enable_gqa))
        return attend(query, key, value, enable_gqa=enable_gqa, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    states = [model.model(input_ids=ids, use_cache=False).last_hidden_state]
    for fits in (False, True):
        internals.limit_grouped_queries(lambda key: fits)  # noqa: B023
        states.append(model.model(input_ids=ids, use_cache=False).last_hidden_state)
    assert calls == [(2, True), (4, False), (2, True)]
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(states[2], states[0])


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from transformers import masking_utils

    sizes: list[int] = []
    look = masking_utils.find_packed_sequence_indices

    def counted(position_ids: torch.Tensor) -> torch.Tensor | None:
        sizes.append(position_ids.shape[0])
        return look(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", counted)
    return sizes


def test_positions_that_rows_share_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row is ambiguous; from two rows on it is known, and the states are bitwise the same."""
    sizes = asked(monkeypatch)
    model = AutoModelForCausalLM.from_config(tiny_config("capped")).eval()  # with a sliding window: two masks
    check, ids = PackingCheck(), torch.arange(2 * 40).reshape(2, 40) % 20
    expected = [model.model(input_ids=ids[:rows], use_cache=False).last_hidden_state for rows in (1, 2)]
    masks = len(sizes) // 2
    assert masks == 2
    sizes.clear()
    found = []
    for rows in (1, 1, 2, 1, 2):
        with check():
            found.append(model.model(input_ids=ids[:rows], use_cache=False).last_hidden_state)
    assert sizes == [1, 1, 1, 1, 2] and check.shared
    assert all(torch.equal(one, expected[len(one) - 1]) for one in found)


def test_positions_derived_from_tokens_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = asked(monkeypatch)
    model = AutoModelForCausalLM.from_config(tiny_config("tied")).eval()
    check, ids = PackingCheck(), torch.arange(12).reshape(2, 6)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    expected = model.model(input_ids=ids, position_ids=packed, use_cache=False).last_hidden_state
    sizes.clear()
    for _ in range(2):
        with check():
            assert torch.equal(
                model.model(input_ids=ids, position_ids=packed, use_cache=False).last_hidden_state, expected
            )
    assert sizes == [2, 2] and not check.shared


def test_the_decision_on_packed_positions_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("tied")).eval()
    ids, packed = torch.arange(6)[None], torch.tensor([[0, 1, 2, 0, 1, 2]])
    whole, apart = (
        model.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
        for positions, mask in ((packed, torch.ones_like(ids)), (packed, None))
    )
    with internals.deciding_on_packing(lambda positions, look: None, lambda: True):
        found = model.model(input_ids=ids, position_ids=packed, use_cache=False).last_hidden_state
    assert torch.equal(found, whole) and not torch.allclose(found, apart)
    with internals.deciding_on_packing(lambda positions, look: look(positions), lambda: False):
        found = model.model(input_ids=ids, position_ids=packed, use_cache=False).last_hidden_state
    assert torch.equal(found, apart)


def test_the_decision_on_a_row_is_used_in_its_layers() -> None:
    from transformers import modeling_flash_attention_utils as flash

    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for known in (True, False):
        with internals.deciding_on_packing(lambda positions, look: None, lambda: known):  # noqa: B023
            assert bool(flash._is_packed_sequence(packed, 1)) != known
    assert flash._is_packed_sequence(packed, 1), "and it is as before"


def answer(made: Any, name: str) -> list[int]:
    """The tokens that a manager generates for a prompt added before its start."""
    assert made.add_request(IDS[0].tolist(), request_id=name) == name
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
        assert not batching.decodes_from_pages(config)
        assert internals.is_flash_attention_requested(config) == name.startswith("flash")
    for name in (f"flash_attention_{version}", f"kernels-community/flash-attn{version}"):
        config._attn_implementation = name
        assert batching.decodes_from_pages(config) and batching.decodes_from_pages(config, version)
        assert not batching.decodes_from_pages(config, 5 - version)
        assert internals.is_flash_attention_requested(config)
    # The first token is that of the prefill; with unsupported pages there is no second one.
    with flash_attention(model, version) as calls, running(model, page_size=page, blocks=2) as made:
        result = made.get_result(timeout=20)
    assert (result.error is None) == bool(calls.decoded) == (version == 3 or page == 256)
    assert result.error is None or "divisible by 256" in result.error


def test_a_stopped_manager_generates_again_with_the_same_cache_until_it_is_forgotten(model: Any) -> None:
    made = manager(model)
    first, caches = answer(made, "0"), live_caches()
    batching.stop_keeping_graphs(made)
    assert not made.is_running()
    assert answer(made, "1") == first and live_caches() == caches and len(caches) == 1
    batching.stop_keeping_graphs(made)
    batching.forget_manager(model, made)
    assert not live_caches() and all("batching" not in name for name in vars(model))


def test_the_layers_that_loading_quantizes(tmp_path: Path) -> None:
    """Without weights, the same ones as with ``from_pretrained``."""
    folder = make_model(tmp_path, "tied")
    config = BitsAndBytesConfig(load_in_4bit=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    expected = {name for name, module in loaded.named_modules() if type(module).__name__ == "Linear4bit"}
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    linear = [name for name, module in bare.named_modules() if isinstance(module, nn.Linear)]
    assert set(internals.quantized_names(bare, linear, config)) == expected != set(linear)
    internals.replace_by_4bit(bare, config)
    assert {name for name, module in bare.named_modules() if type(module).__name__ == "Linear4bit"} == expected


def test_a_configuration_tells_which_attention_was_chosen() -> None:
    asked = tiny_config("tied")
    asked._attn_implementation = "eager"
    assert "eager" not in str(asked.to_dict())
    for given, expected in (
        (tiny_config("tied"), (None, "sdpa", None)),
        (asked, ("eager", "eager", "eager")),
        (AutoConfig.for_model("gemma2"), (None, "eager", None)),
    ):
        before = internals.chosen_attention(given)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(given)
        assert (before, internals.chosen_attention(model.config), internals.requested_attention(model)) == expected


def test_experts_compute_in_fp32_without_data() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        vocab_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    shapes = []

    def product(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        shapes.append((*rows.shape, *weight.shape, *offs.shape))
        return rows @ weight[0]

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        with pytest.raises(RuntimeError, match="BF16"):
            made(tokens)
        with internals.experts_with(product):
            assert made(tokens).logits.shape == (1, 8, 64)
    assert shapes == [(16, 32, 4, 32, 32, 4), (16, 16, 4, 16, 32, 4)]


def test_layers_call_a_checkpoint_function_of_their_own() -> None:
    """With hidden states as the first argument, if checkpointing is enabled and in training only."""
    made = AutoModelForCausalLM.from_config(tiny_config("untied"))
    layers = made.model.layers
    assert not any(map(internals.checkpoint_function, layers))
    made.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(internals.checkpoint_function, layers)) and internals.checkpoint_function(made.model.norm) is None
    shapes: list[tuple[int, ...]] = []

    original: Any = internals.checkpoint_function(layers[1])

    def recorded(function: Any, *args: Any) -> Any:
        shapes.append(args[0].shape)
        return original(function, *args)

    internals.set_checkpoint_function(layers[1], recorded)
    made(IDS)
    assert shapes == [(1, 4, 32)]
    made.eval()(IDS)
    internals.set_checkpoint_function(layers[1], original)
    made.train()(IDS)
    assert len(shapes) == 1
