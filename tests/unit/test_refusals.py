"""Refusals of arguments, options and data that no other test triggers, and values that are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from support.data_tokenizers import char_tokenizer
from transformers import TrainingArguments

from alignment import DPOConfig, KTOConfig, OnlineDPOConfig, OnlineDPOTrainer, SFTConfig
from alignment.config.checks import without_counterparts
from alignment.config.deepspeed import load_deepspeed_config, policy_config
from alignment.config.dtypes import plan_dtypes
from alignment.config.errors import DataError, ModelError, OptionError
from alignment.data.columns import arranged, foreign_columns
from alignment.data.kinds.completions import Completions
from alignment.data.kinds.prompts import PROMPTS
from alignment.data.messages import source_of
from alignment.data.mixture import Part
from alignment.data.sources import _guarded, dataset_from_python, load_split
from alignment.methods.sft import _formatted
from alignment.planning.engines import _by_adapters
from alignment.training import preparation
from alignment.training.arguments import model_and_options, refuse_arguments, with_arguments

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (SFTConfig, {"dataset_kwargs": {"add_special_tokens": False}}, "special tokens are always added; remove"),
        (SFTConfig, {"dataset_kwargs": {"skip": True}}, "unknown key 'skip'; the only supported key is skip_prepare"),
        (
            DPOConfig,
            {"loss_weights": [1, 0], "loss_type": ["sigmoid", "sft"]},
            "must be greater than 0; remove a",
        ),
        (KTOConfig, {"lora_r": 8, "adapter_name_or_path": "a"}, "has no effect with adapter_name_or_path='a', which"),
    ],
)
def test_options_without_effect(cls: type, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        cls("out", **given)
    (name, value), *_ = given.items()
    value = [1.0, 0.0] if name == "loss_weights" else value
    assert str(caught.value).startswith(f"{name}={value!r}: {said}")


def test_options_next_to_those_that_are_refused() -> None:
    tokenized = {"add_special_tokens": True, "skip_prepare_dataset": True}
    assert SFTConfig("out", dataset_kwargs=tokenized).dataset_kwargs == tokenized
    tiny = DPOConfig("out", loss_type=["sigmoid", "sft"], loss_weights=[1, 1e-9])  # type: ignore[arg-type]
    assert tiny.losses == [("sigmoid", 1.0), ("sft", 1e-9)]
    assert DPOConfig("out", loss_type=None).loss_type == "sigmoid"  # type: ignore[arg-type]
    assert DPOConfig("out", loss_type=["hinge"]).loss_type == "hinge"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, "lora_r load_in_4bit bnb_4bit_quant_type"),
        ({"load_in_4bit": "false"}, "lora_r load_in_4bit"),
        ({"load_in_4bit": "true"}, "lora_r load_in_4bit bnb_4bit_quant_type"),
        ({"load_in_8bit": "true"}, "lora_r"),
        ({"load_in_8bit": "false"}, "lora_r load_in_4bit bnb_4bit_quant_type"),
        ({"use_peft": "false"}, "load_in_4bit bnb_4bit_quant_type"),
        ({"adapter_name_or_path": "a"}, "load_in_4bit bnb_4bit_quant_type"),
    ],
)
def test_what_a_command_line_replaces_in_a_recipe(given: dict[str, Any], left: str) -> None:
    recipe = {"lora_r": 4, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    assert [*without_counterparts(KTOConfig, recipe, given)] == left.split()


def test_keys_of_the_deepspeed_json(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(OptionError, match="list.json: expected a JSON object with DeepSpeed keys, found list$"):
        load_deepspeed_config(str(tmp_path / "list.json"), "zero2")
    options = KTOConfig("out")
    manual: dict[str, Any] = {"zero_optimization": {"stage": 2}, "memory_breakdown": "auto"}
    with pytest.raises(OptionError, match='^DeepSpeed mapping: memory_breakdown="auto": this key has no automatic'):
        policy_config(options, manual, plan_dtypes(options, manual), 1, 8)
    assert plan_dtypes(KTOConfig("out", fp16=False, use_cpu=True), {}).compute == "float32"
    short = {"data_types": {"grad_accum_dtype": "fp16"}, "zero_optimization": {"stage": 2}}
    with pytest.raises(
        OptionError, match=r'grad_accum_dtype="fp16" .*: with the compute dtype bfloat16, expected "bf'
    ):
        plan_dtypes(KTOConfig("out", bf16=True), short)


def test_arguments_of_trainers() -> None:
    refuse_arguments({"model_init": None, "compute_metrics": None})
    with pytest.raises(TypeError, match="^unexpected keyword argument 'modle'$"):
        refuse_arguments({"modle": None})
    options = KTOConfig("out", ref_adapter_name="r", use_peft=True)
    assert with_arguments(options, "m", ref_adapter_name=None) is options
    assert with_arguments(options, "m", ref_adapter_name="r").ref_adapter_name == "r"
    with pytest.raises(OptionError, match="^ref_adapter_name='s': the options have 'r'; remove one$"):
        with_arguments(options, "m", ref_adapter_name="s")


def test_options_made_from_those_of_transformers() -> None:
    @dataclasses.dataclass
    class Further(TrainingArguments):  # type: ignore[misc]
        mine: int = 0

    with pytest.raises(OptionError, match="^args: mine of Further cannot be converted; pass a KTOConfig$"):
        model_and_options("KTOTrainer", KTOConfig, "m", Further("out", use_cpu=True))
    for model, folder in (("a/tiny", "tiny-KTO"), ("", "model-KTO")):
        live: Any = SimpleNamespace(config=SimpleNamespace(name_or_path=model))
        assert model_and_options("KTOTrainer", KTOConfig, live, None)[1].output_dir == folder
    assert model_and_options("KTOTrainer", KTOConfig, "a/tiny", None)[1].output_dir == "tiny-KTO"


def test_an_online_trainer_has_one_list_of_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="^reward_processing_class and reward_processing_classes contradict"):
        OnlineDPOTrainer("m", reward_processing_class=1, reward_processing_classes=[1])
    monkeypatch.setattr("alignment.methods.online_dpo.AlignmentTrainer.__init__", lambda self, *a, **k: None)
    for given, kept in (({"reward_processing_class": 1}, 1), ({"reward_processing_classes": [2]}, [2]), ({}, None)):
        trainer = OnlineDPOTrainer("m", reward_model="r", reward_funcs=[len], **given)
        assert trainer._given == ("r", [len], None, kept)
        trainer.args = OnlineDPOConfig("out", reward_model_path="p")
        assert trainer.reward_funcs == ["r", len]
        trainer._given = (None, None, None, None)
        assert trainer.reward_funcs == ["p"] and trainer.reward_weights.tolist() == [1.0]
        trainer.args, trainer._given = OnlineDPOConfig("out", judge="a.py:b"), ("r", [len], None, None)
        assert trainer.reward_funcs == []


def test_an_adapter_for_a_reference_without_adapters() -> None:
    options: Any = SimpleNamespace(ref_placement="replica", ref_adapter_name=None)
    assert _by_adapters(options, None, True) is False
    options.ref_adapter_name = "sft"
    with pytest.raises(OptionError, match="^ref_adapter_name='sft': has no effect with ref_placement='replica'; "):
        _by_adapters(options, None, True)


def test_chat_templates_that_cannot_be_used(tmp_path: Path) -> None:
    policy: Any = SimpleNamespace(live=None)
    char_tokenizer().save_pretrained(tmp_path)
    for path, said in (
        (f"{tmp_path}/no.jinja", "cannot be read: .* set it to a Jinja"),
        (str(tmp_path), "no chat"),
    ):
        with pytest.raises(ModelError, match=f"^chat_template_path='{path}': .*{said}"):
            preparation.with_options(char_tokenizer(), SFTConfig("out", chat_template_path=path), policy)
    with pytest.raises(OptionError, match="^tokenizer: processing_class is also passed; remove tokenizer, its older"):
        preparation._load_tokenizer(char_tokenizer(), object(), policy, SFTConfig("out"))
    preparation._check_new(policy, True, ["<x>"], (None, None))
    preparation._check_new(policy, False, [], (object(), None))
    with pytest.raises(OptionError, match="^chat_template_path: adds tokens, which resizes .* invalidates optimizers"):
        preparation._check_new(policy, True, [], (None, object()))
    policy.live = SimpleNamespace(peft_config={"default": 1})
    preparation._check_new(policy, True, [], (None, None))
    with pytest.raises(OptionError, match="^chat_template_path: adds tokens to a model that already has adapters"):
        preparation._check_new(policy, True, ["<x>"], (None, None))


def rows_of(column: Any) -> Dataset:
    return Dataset(pa.table({"prompt": ["a"], "image": column}))


TEXTS = Completions(None, False, "text", tokenized=False)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: load_split("", None, "train"), "dataset_name is empty; set it to a file, a folder or a Hub name"),
        (lambda: source_of({}, "row 3", None), 'row 3: prompt is missing; every row must have one (use "" or []'),
        (lambda: source_of({"system": 5}, "row 3", []), "row 3: system is 5 (an integer); expected a string"),
        (
            lambda: TEXTS.parse({"prompt": "a"}, "row 3", {}),
            "row 3: completion is missing; every row must have prompt and completion, or messages, or text, or conv",
        ),
    ],
)
def test_rows_that_cannot_be_used(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        act()
    assert str(caught.value).startswith(said)


def test_empty_columns_of_images_and_foreign_types() -> None:
    for column in ([None], [[]]):
        found, others = arranged(rows_of(pa.array(column, pa.list_(pa.string()))), {}, PROMPTS, "d")
        assert found["prompt"] == ["a"] and others == ["image"]
    stored = pa.table({"name": pa.array(["a"]).dictionary_encode(), "b": pa.array([b"x"]).dictionary_encode()})
    features: Any = SimpleNamespace(arrow_schema=stored.schema)
    assert foreign_columns(features) == ["b"]


def test_errors_of_loaders_name_the_data() -> None:
    def fails(cause: Exception | None) -> Any:
        raise DatasetGenerationError("outside") from cause

    with pytest.raises(DataError, match="^line 3 is bad$"):
        _guarded("d", lambda: fails(DataError("line 3 is bad")))
    with pytest.raises(DataError, match="^d: cannot be read: inside; set dataset_name to a file, a folder or"):
        _guarded("d", lambda: fails(OSError("inside")), hub=True)
    with pytest.raises(DataError, match="^dataset is a list that cannot be stored: .*; use values that JSON"):
        dataset_from_python([{"a": "\ud800"}])


def test_a_formatting_function_makes_the_texts() -> None:
    with pytest.raises(OptionError, match="^formatting_func: not supported with dataset_mixture; use datasets with a"):
        _formatted((1, 2), str, "d", "text")
    rows = [{"q": "one", "a": "two"}, {"q": "x", "a": "y"}]
    for source in (rows, Part("d", lambda: Dataset.from_list(rows))):
        found = _formatted(source, lambda row: f"{row['q']} {row['a']}", "d", "body")
        assert found["body"] == ["one two", "x y"] and found.column_names == ["body"]
