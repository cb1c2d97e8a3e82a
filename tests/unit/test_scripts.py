"""What TRL scripts import in addition to configs and trainers."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from data_tokenizers import PLAIN, char_tokenizer, word_tokenizer
from datasets import Dataset
from helpers import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import alignment
from alignment import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from alignment.checkpoint.saving import written_folder
from alignment.config.errors import OptionError
from alignment.online.arguments import is_of
from alignment.training.arguments import with_arguments


@dataclass
class Arguments:
    rate: float
    name: str = "alpha"


@dataclass
class Taken:
    config: str = ""


def parsed(tmp_path: Path, text: str, *arguments: str, **kwargs: Any) -> tuple[Any, ...]:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return TrlParser(Arguments).parse_args_and_config([*arguments, "--config", str(file)], **kwargs)


def test_the_file_sets_defaults_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    assert parsed(tmp_path, "rate: 5e-7\nname: beta", "--name", "gamma") == (Arguments(5e-7, "gamma"),)
    file = tmp_path / "config.yaml"
    assert TrlParser([Arguments]).parse_args_and_config([f"--config={file}"]) == (Arguments(5e-7, "beta"),)


def test_env_is_set_and_is_not_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCRIPTS_TEST", raising=False)
    assert parsed(tmp_path, "env: {SCRIPTS_TEST: 3}\nrate: 1") == (Arguments(1.0),)
    assert os.environ.pop("SCRIPTS_TEST") == "3"
    with pytest.raises(ValueError, match="`env` field should be a dict"):
        parsed(tmp_path, "env: 3\nrate: 1")


def test_unknown_arguments_fail_or_warn_or_are_returned(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--nmae beta: unknown argument"):
        parsed(tmp_path, "rate: 1\nnmae: beta")
    with pytest.warns(UserWarning, match="--nmae beta"):
        assert parsed(tmp_path, "rate: 1\nnmae: beta", fail_with_unknown_args=False) == (Arguments(1.0),)
    more = {"return_remaining_strings": True}
    assert parsed(tmp_path, "rate: 1\na: b", "rest", **more)[1:] == (["--a", "b", "rest"],)
    more["separate_remaining_strings"] = True
    assert parsed(tmp_path, "rate: 1\na: b", "rest", **more)[1:] == (["--a", "b"], ["rest"])


def test_subcommands_read_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rate: 2")
    for command in ("one", "two"):
        parser = TrlParser()
        commands = parser.add_subparsers(dest="command", parser_class=TrlParser)
        for name in ("one", "two"):
            commands.add_parser(name, help="a script", dataclass_types=(Arguments,))
        (namespace,) = parser.parse_args_and_config([command, "--config", str(tmp_path / "config.yaml")])
        assert (namespace.command, namespace.rate) == (command, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "invalid YAML"), ("- a", "expected a mapping, found list"), (None, "cannot be read")],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=message):
        TrlParser(Arguments).parse_args_and_config(["--config", str(file)])
    with pytest.raises(OptionError, match="--config expects a value"):
        TrlParser(Arguments).parse_args_and_config(["--config"])


def test_a_field_named_config_is_refused() -> None:
    with pytest.raises(ValueError, match="Taken has a field named 'config'"):
        TrlParser((Taken,))


def test_model_arguments() -> None:
    line = "--torch_dtype bfloat16 --use_peft --lora_target_modules all-linear --load_in_4bit --trust_remote_code"
    (model,) = TrlParser(ModelConfig).parse_args_and_config(line.split())
    assert model.dtype == model.torch_dtype == "bfloat16" and model.trust_remote_code
    adapters = alignment.get_peft_config(model)
    assert adapters is not None
    assert (adapters.r, adapters.lora_alpha, adapters.lora_dropout) == (16, 32, 0.05)
    assert (adapters.target_modules, adapters.task_type, adapters.bias) == ("all-linear", "CAUSAL_LM", "none")
    weights = alignment.get_quantization_config(model)
    assert weights is not None and weights.load_in_4bit and not weights.bnb_4bit_use_double_quant
    assert weights.bnb_4bit_quant_type == "nf4" and str(weights.bnb_4bit_compute_dtype) == "torch.bfloat16"
    (plain,) = TrlParser(ModelConfig).parse_args_and_config([])
    assert plain.dtype == plain.torch_dtype == "float32"
    assert alignment.get_peft_config(plain) is None and alignment.get_quantization_config(plain) is None
    eight = alignment.get_quantization_config(ModelConfig(load_in_8bit=True))
    assert eight is not None and eight.load_in_8bit
    two = ModelConfig(use_peft=True, lora_target_modules=["q", "k"], lora_r=4, lora_task_type="SEQ_CLS", use_dora=True)
    adapters = alignment.get_peft_config(two)
    assert adapters is not None and {"q", "k"} == adapters.target_modules
    assert (adapters.r, adapters.task_type, adapters.use_dora) == (4, "SEQ_CLS", True)


def test_contradicting_model_arguments() -> None:
    with pytest.raises(OptionError, match="contradict each other"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)
    with pytest.raises(OptionError, match="torch_dtype='float16' and dtype='bfloat16' contradict"):
        ModelConfig(dtype="bfloat16", torch_dtype="float16")
    with pytest.raises(OptionError, match="dtype='bf16': expected one of"):
        ModelConfig(dtype="bf16")
    with pytest.warns(UserWarning, match="lora_r=4: has no effect without use_peft"):
        alignment.get_peft_config(ModelConfig(lora_r=4))
    with pytest.raises(OptionError, match="gradient_checkpointing_kwargs"):
        ScriptArguments(gradient_checkpointing_use_reentrant=True)


def test_a_mixture_with_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, name: str | None = None, **arguments: Any) -> Dataset:
        return Dataset.from_dict({"text": [f"{path}{row}" for row in range(int(path))], "more": [0] * int(path)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    parts: list[Any] = [{"path": "10", "columns": ["text"]}, {"path": "4", "columns": ["text"]}]
    whole = alignment.get_dataset(DatasetMixtureConfig(datasets=parts))["train"]
    assert whole.column_names == ["text"] and len(whole) == 14
    shares = [{**part, "fraction": fraction} for part, fraction in zip(parts, (0.2, 0.6))]
    mixed = alignment.get_dataset(DatasetMixtureConfig(datasets=shares))["train"]
    assert mixed["text"] == ["100", "40", "41", "42", "43"]  # 4 rows are three quarters of 5.33
    split = alignment.get_dataset(DatasetMixtureConfig(datasets=parts, test_split_size=0.5))
    assert (len(split["train"]), len(split["test"])) == (7, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no datasets"),
        ({"datasets": [{"path": "a", "fraction": 1.0}, {"path": "b"}]}, r"datasets\[1\].fraction is not set"),
        ({"datasets": [{"path": "a", "fraction": 0.0}]}, "must be greater than 0"),
        ({"datasets": [{"path": "a", "fraction": 0.5}], "streaming": True}, "set streaming: false"),
        ({"datasets": [{"path": "a"}], "streaming": True, "test_split_size": 0.1}, "not supported with streaming"),
        ({"datasets": [{"path": "a", "splits": "b"}]}, r"datasets\[0\].splits='b': unknown key.*did you mean 'split'"),
        ({"datasets": [{"split": "b"}]}, "path is missing"),
        ({"datasets": ["a"]}, "expected a mapping"),
    ],
)
def test_an_invalid_mixture(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        alignment.get_dataset(DatasetMixtureConfig(**options))


WORDS = "a b c"


def fresh_model() -> Any:
    return AutoModelForCausalLM.from_config(tiny_config("tied"))


def test_chat_formats() -> None:
    tokenizer, model = word_tokenizer(WORDS), fresh_model()
    tokenizer.chat_template = None
    before = len(tokenizer)
    model, tokenizer = alignment.setup_chat_format(model, tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>",) * 2 + ("<|im_start|>",)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer) == before + 2 == model.get_input_embeddings().weight.shape[0]
    with pytest.raises(ValueError, match="already has a chat template"):
        alignment.setup_chat_format(model, tokenizer)
    tokenizer.chat_template = alignment.SIMPLE_CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "User: a\n\nAssistant:"


def test_the_template_of_another_tokenizer(tmp_path: Path) -> None:
    source, tokenizer, model = word_tokenizer(WORDS), word_tokenizer(WORDS), fresh_model()
    source.add_special_tokens({"eos_token": "<end>"})
    source.chat_template = "{{ 'x' }}"
    source.save_pretrained(tmp_path)
    before = len(tokenizer)
    model, tokenizer, added = alignment.clone_chat_template(model, tokenizer, str(tmp_path))
    assert tokenizer.chat_template == "{{ 'x' }}" and tokenizer.eos_token == "<end>"
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == -(-(before + 1) // 64) * 64
    assert added == list(range(before, len(tokenizer))) and added[0] == model.config.eos_token_id


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)


def test_rows_are_rendered_by_the_template_and_split_again() -> None:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = alignment.SIMPLE_CHAT_TEMPLATE
    pair = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    expected = {"prompt": "User: a\n\nAssistant:", "chosen": " b\n\n", "rejected": " c\n\n"}
    assert alignment.maybe_apply_chat_template(pair, tokenizer) == expected
    assert alignment.maybe_apply_chat_template(expected, tokenizer) is expected
    assert alignment.apply_chat_template({"messages": [USER]}, tokenizer) == {"text": "User: a\n\n"}
    row = {"prompt": [USER], "completion": [GOOD], "label": True}
    assert alignment.apply_chat_template(row, tokenizer)["label"] is True
    with pytest.raises(KeyError, match="Invalid keys"):
        alignment.apply_chat_template({"chosen": [USER]}, tokenizer)
    implicit = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert alignment.maybe_extract_prompt(implicit) == pair
    assert alignment.maybe_extract_prompt(pair) is pair
    assert alignment.extract_prompt({"chosen": "It is blue", "rejected": "It is red"})["prompt"] == "It is"


def test_pairs_become_labeled_rows() -> None:
    pairs = Dataset.from_dict({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"], "id": [3]})
    rows = alignment.maybe_unpair_preference_dataset(pairs)
    assert [tuple(row[key] for key in ("prompt", "completion", "label", "id")) for row in rows] == [
        ("p", "a", True, 3),
        ("p", "b", False, 3),
    ]
    assert alignment.maybe_unpair_preference_dataset(rows) is rows


def test_quantization_of_a_model_given_by_name(tmp_path: Path) -> None:
    weights = alignment.get_quantization_config(ModelConfig(load_in_4bit=True))
    options = alignment.KTOConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs={"revision": "main"})
    changed = with_arguments(options, "model", weights)
    assert changed.model_init_kwargs == {"revision": "main", "quantization_config": weights}
    assert options.model_init_kwargs == {"revision": "main"} and with_arguments(options, "model", None) is options
    with pytest.raises(OptionError, match="also set in model_init_kwargs"):
        with_arguments(changed, "model", weights)
    with pytest.raises(OptionError, match="cannot be applied to a live model"):
        with_arguments(options, fresh_model(), weights)


def test_further_arguments_next_to_options() -> None:
    parser = TrlParser((ScriptArguments, alignment.KTOConfig, ModelConfig))
    line = "--dataset_name d --model_name_or_path m --use_peft --trust_remote_code --output_dir o --use_cpu --bf16"
    script, options, model = parser.parse_args_and_config(line.split())
    assert (script.dataset_name, model.model_name_or_path, model.use_peft) == ("d", "m", True)
    assert (options.bf16, options.output_dir, options.use_peft, options.dataset_name) == (True, "o", False, None)
    assert model.trust_remote_code and options.trust_remote_code  # scripts may read it from either
    assert parser.parse_args_and_config("--output_dir o --use_cpu --bf16 false".split())[1].bf16 is False


def test_a_reward_model_loaded_from_its_option_is_recognized(tmp_path: Path) -> None:
    fresh_model().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_of(loaded, str(tmp_path)) and is_of(str(tmp_path), str(tmp_path))
    assert not is_of(loaded, "another") and not is_of(len, str(tmp_path)) and not is_of(None, None)


def test_a_tokenizer_loaded_with_the_models_keywords_can_be_saved(tmp_path: Path) -> None:
    word_tokenizer(WORDS).save_pretrained(tmp_path / "given")
    keywords = {"dtype": torch.float32, "quantization_config": alignment.get_quantization_config(ModelConfig())}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "given", padding_side="left", **keywords)
    with written_folder(tmp_path / "written", tokenizer):
        pass
    assert AutoTokenizer.from_pretrained(tmp_path / "written").padding_side == "left"


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [("messages", True), ("prompt", True), ("prompt completion", True), ("prompt completion label", True),
     ("prompt chosen rejected", True), ("chosen rejected", True), ("chosen", False), ("completion", False),
     ("prompt label", False), ("prompt rejected", False), ("messages prompt", False)],
)  # fmt: skip
def test_the_rows_that_a_template_is_applied_to(keys: str, accepted: bool) -> None:
    said = [{"role": "user", "content": "a"}]
    row = {key: True if key == "label" else said for key in keys.split()} | {"other": 1}
    tokenizer = char_tokenizer(template=PLAIN)
    if accepted:
        found = alignment.apply_chat_template(row, tokenizer)
        assert set(found) == ({"text"} if "messages" in row else set(keys.split()))
        return
    with pytest.raises(KeyError, match="Invalid keys in the example"):
        alignment.apply_chat_template(row, tokenizer)


def test_every_setting_of_a_dataset_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = Dataset.from_dict({"a": [1, 2], "b": [3, 4]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **more: asked.append((names, more)) or rows)
    one = {"path": "p", "name": "n", "data_dir": "d", "data_files": "f", "split": "s", "columns": ["b"]}
    found = alignment.get_dataset(DatasetMixtureConfig([one], streaming=True))  # type: ignore[list-item]
    assert asked == [(("p", "n"), {"data_dir": "d", "data_files": "f", "split": "s", "streaming": True})]
    assert found["train"].column_names == ["b"] and found["train"]["b"][:] == [3, 4]


@pytest.mark.parametrize("cls", [ModelConfig, ScriptArguments, DatasetMixtureConfig])
def test_every_argument_of_scripts_has_help(cls: type) -> None:
    for field in dataclasses.fields(cls):
        assert len(field.metadata.get("help") or "") > 10, field.name
