"""Additional tokens of a chat template, embeddings for them, and merging of a live model's adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.data_tokenizers import word_tokenizer
from support.helpers import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from alignment import SFTConfig
from alignment.config.errors import OptionError
from alignment.models.adapters import merging
from alignment.models.adapters.merging import merge_live
from alignment.models.vocabulary import Vocabulary, resize
from alignment.training.preparation import with_options

WORDS = "a b c"


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_new_rows_are_the_mean_of_the_old_ones(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    before = [end.weight.detach().clone() for end in ends]
    state = torch.get_rng_state()
    resize(model, 128)
    assert torch.equal(torch.get_rng_state(), state)
    for old, end in zip(before, [model.get_input_embeddings(), model.get_output_embeddings()]):
        assert torch.equal(end.weight[: len(old)], old)
        torch.testing.assert_close(end.weight[len(old) :], old.mean(0).expand(128 - len(old), -1))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (kind == "tied")
    assert model.config.vocab_size == 128


def model_of(rows: int) -> Any:
    """A model with this number of embeddings."""
    return SimpleNamespace(config=PretrainedConfig(vocab_size=rows), name="model", live=None)


def of(source: Any, tmp_path: Path, rows: int) -> tuple[Any, Vocabulary]:
    source.save_pretrained(tmp_path)
    options = SFTConfig(str(tmp_path / "out"), chat_template_path=str(tmp_path))
    return with_options(word_tokenizer(WORDS), options, model_of(rows))


def test_tokens_of_a_template(tmp_path: Path) -> None:
    source = word_tokenizer(WORDS)
    source.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<unused>"]})
    source.chat_template = "{{ messages[0]['content'] }}<end>"
    known = len(word_tokenizer(WORDS))
    tokenizer, vocabulary = of(source, tmp_path, known)
    assert (tokenizer.eos_token, len(tokenizer), vocabulary.rows) == ("<end>", 64, 64)
    assert vocabulary.new == tuple(range(known, 64)) and vocabulary.eos == tokenizer.eos_token_id
    tokenizer, vocabulary = of(source, tmp_path, 100)  # a model with unused rows, like Qwen's
    assert (len(tokenizer), vocabulary.rows, vocabulary.new) == (known + 2, None, (known, known + 1))


def test_a_template_without_new_tokens_adds_none(tmp_path: Path) -> None:
    source = word_tokenizer(WORDS)
    source.add_tokens(["<unused>"])
    source.chat_template = "{{ messages[0]['content'] }}</s>"
    tokenizer, vocabulary = of(source, tmp_path, len(word_tokenizer(WORDS)))
    assert (len(tokenizer), vocabulary.rows, vocabulary.new) == (len(word_tokenizer(WORDS)), None, ())
    assert tokenizer.chat_template == source.chat_template


def test_a_template_in_a_file(tmp_path: Path) -> None:
    path, template = tmp_path / "chat.jinja", "{{ messages[0]['content'] }}"
    path.write_text(template)
    own = word_tokenizer(WORDS)
    tokenizer, vocabulary = with_options(own, SFTConfig("out", chat_template_path=str(path)), model_of(len(own)))
    assert tokenizer.chat_template == template and tokenizer.get_vocab() == own.get_vocab()
    assert (tokenizer.eos_token, vocabulary.rows, vocabulary.new) == (own.eos_token, None, ())


def test_tokens_of_the_vocabulary() -> None:
    own = word_tokenizer(WORDS)
    first, second = WORDS.split()[:2]
    tokenizer, vocabulary = with_options(own, SFTConfig("out", eos_token=first, pad_token=second), model_of(len(own)))
    assert (tokenizer.eos_token, tokenizer.pad_token) == (first, second)
    assert (vocabulary.eos, vocabulary.rows) == (own.get_vocab()[first], None) and own.eos_token != first
    for name in ("eos_token", "pad_token"):
        with pytest.raises(OptionError, match=f"^{name}='<new>': not in the vocabulary"):
            with_options(own, SFTConfig("out", **{name: "<new>"}), model_of(len(own)))


def adapted(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_config(tiny_config("untied"), dtype=dtype), config)


def test_merging_is_reported() -> None:
    live = adapted(LoraConfig(r=2, target_modules=["q_proj"]), torch.bfloat16)
    live.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model, note = merge_live(live)
    assert not hasattr(model, "peft_config") and not any("lora" in name for name, _ in model.named_modules())
    assert "'default' was merged into the base model in bfloat16; others are dropped" in note


def test_unsupported_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(OptionError, match="^peft_config: .*PROMPT_TUNING"):
        merge_live(adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    live = adapted(lora)
    live.add_adapter("other", lora)
    live.base_model.set_adapter(["default", "other"])
    with pytest.raises(OptionError, match="^peft_config: .*default, other"):
        merge_live(live)
    for what, message in (("is_packed", "quantized"), ("is_partitioned", "ZeRO-3")):
        with monkeypatch.context() as patched, pytest.raises(OptionError, match=message):
            patched.setattr(merging, what, lambda parameter: isinstance(parameter, nn.Parameter))
            merge_live(adapted(lora))
