"""Options of TRL and of TrainingArguments: all are known, and none is rejected at its own default."""

from __future__ import annotations

import copy
import dataclasses
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from alignment.compat.trl.names import older_names, value_here
from alignment.compat.trl.verdicts import judged_names
from alignment.config.errors import OptionError
from alignment.config.fields import option_fields
from alignment.config.options_model import loading_keywords
from alignment.config.registry import METHODS, option_names
from alignment.methods.kto_options import KTOConfig
from alignment.training.arguments import model_and_options

pytestmark = pytest.mark.usefixtures("one_process")
PLACES = {
    "kto": "trl.experimental.kto:KTOConfig",
    "cpo": "trl.experimental.cpo:CPOConfig",
    "online_dpo": "trl.experimental.online_dpo:OnlineDPOConfig",
    "dpo": "trl:DPOConfig",
    "reward": "trl:RewardConfig",
    "sft": "trl:SFTConfig",
}
with_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


def defaults(cls: Any) -> dict[str, Any]:
    """The defaults of a dataclass that can be given one by one."""
    return {
        each.name: each.default if each.default is not dataclasses.MISSING else each.default_factory()
        for each in dataclasses.fields(cls)
        if each.init and each.name != "output_dir"
    }


def theirs(method: str) -> Any:
    """TRL's configuration of a method."""
    module, _, name = PLACES[method].partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("method", METHODS)
def test_every_training_argument_is_accounted_for(method: str) -> None:
    cls, given = METHODS[method], defaults(TrainingArguments)
    known = option_names(cls) | set(older_names(cls))
    assert set(given) <= known
    for name, value in given.items():
        cls("out", **{name: value})


# The defaults other than null and false of options that the installed transformers does not have.
DEFAULTS = {
    "save_safetensors": True, "label_pad_token_id": -100,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "base_model_attribute_name": "model",
    "vllm_group_port": 51216, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5,
    "dataset_batch_size": 1000,
}  # fmt: skip


def test_options_without_effect_have_the_defaults_of_their_library() -> None:
    """A script reads them from its arguments."""
    theirs, found = defaults(TrainingArguments), {}
    for cls in METHODS.values():
        own = {field.name: field.default for field in option_fields(cls) if field.name in judged_names(cls)}
        for name in own.keys() & theirs.keys():
            assert own[name] == theirs[name] or not (own[name] or theirs[name]), name
        found |= {name: value for name, value in own.items() if name not in theirs}
    assert {name: value for name, value in found.items() if value is not None and value is not False} == DEFAULTS


@with_trl
@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_trl_is_accounted_for(method: str) -> None:
    cls, given = METHODS[method], defaults(theirs(method))
    for name, value in given.items():
        cls("out", **{name: value})
    options = cls("out", **{**given, "use_cpu": True})
    own = (set(given) & option_names(cls)) - judged_names(cls)
    differing = set()
    for name in own - {"use_cpu"}:
        present, value = getattr(cls("out"), name), value_here(name, given[name])
        value = value[0] if isinstance(value, list) else value
        if value is not None and (present or None) != (value or None):
            differing.add(name)
    assert differing == set(cls.TRL_DEFAULTS)
    assert options.output_dir == "out"


def test_values_that_match_the_behavior_are_accepted() -> None:
    options = KTOConfig(
        "out", remove_unused_columns=False, ddp_find_unused_parameters=True, fsdp=[], label_names=["label"],
        average_tokens_across_devices=False, accelerator_config={"split_batches": False}, bf16=True,
        bf16_full_eval=True,
    )  # fmt: skip
    assert options.remove_unused_columns is False
    written = options.to_dict()
    assert written["remove_unused_columns"] is False and "dataloader_pin_memory" not in written


def test_average_tokens_across_devices_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="taken over all devices"):
        KTOConfig("out", average_tokens_across_devices=False)


def test_arguments_passed_on_to_the_model() -> None:
    passed = {"revision": "v1", "use_cache": False}
    given = {"torch_dtype": "auto", "device_map": {"": 0}, "quantization_config": None, **passed}
    options = KTOConfig("out", model_init_kwargs=given)
    assert loading_keywords(options.model_init_kwargs) == passed
    assert options.model_init_kwargs == given and loading_keywords(None) == {}


@dataclasses.dataclass
class Script:
    """Like TRL's ``ScriptArguments``."""

    dataset_name: str | None = None


@dataclasses.dataclass
class Model:
    """Like TRL's ``ModelConfig``."""

    model_name_or_path: str | None = None
    lora_r: int = 16


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_hf_argument_parser(method: str, order: tuple[int, ...]) -> None:
    kinds = (Script, METHODS[method], Model)
    parser = HfArgumentParser([kinds[index] for index in order])
    parser.format_help()
    given = "--dataset_name d --model_name_or_path m --lora_r 8 --no_cuda --bf16 False --gradient_checkpointing"
    given += ' --model_init_kwargs {"a":1} --save_steps 0.5 --evaluation_strategy epoch --output_dir o'
    made = {type(each): each for each in parser.parse_args_into_dataclasses(given.split(), look_for_args_file=False)}
    options = made[METHODS[method]]
    assert (made[Script].dataset_name, made[Model].model_name_or_path, made[Model].lora_r) == ("d", "m", 8)
    assert (options.dataset_name, options.use_cpu, options.bf16, options.save_steps) == (None, True, False, 0.5)
    assert (options.model_init_kwargs, options.eval_strategy, options.output_dir) == ({"a": 1}, "epoch", "o")
    untouched, *_ = HfArgumentParser(METHODS[method]).parse_args_into_dataclasses([], look_for_args_file=False)
    assert untouched == METHODS[method]()


def test_options_set_after_construction_are_checked_by_the_trainer() -> None:
    given = KTOConfig("out", logging_steps=7, model_init_kwargs={"torch_dtype": "bfloat16"})
    given.gradient_checkpointing_kwargs = {"use_reentrant": False}
    given.learning_rate = "1e-5"
    given.logging_steps = 5
    given.model_init_kwargs["device_map"] = "auto"
    given.max_seq_length = 9
    before = copy.deepcopy(given)
    options = given.sealed()
    assert given == before and given.learning_rate == "1e-5" and "max_seq_length" not in vars(given)
    found = (options.learning_rate, options.logging_steps, options.max_length, options.dtype)
    assert found == (1e-5, 5, 9, "bfloat16")
    given.gradient_checkpointing_kwargs["reentrant"] = True
    assert options.gradient_checkpointing_kwargs == {"use_reentrant": False}
    given.save_strategy = "best"
    with pytest.raises(OptionError, match="^save_strategy='best'"):
        given.sealed()


def test_plain_training_arguments_are_accepted() -> None:
    plain = TrainingArguments("out", use_cpu=True, learning_rate=3e-4, warmup_steps=0.1, eval_strategy="epoch")
    _, options = model_and_options("KTOTrainer", KTOConfig, "m", plain)
    assert type(options) is KTOConfig
    assert (options.learning_rate, options.warmup_steps, options.eval_strategy) == (3e-4, 0.1, "epoch")
    assert (options.logging_steps, options.gradient_checkpointing) == (500, False), "theirs, as TRL takes them"
    refusing = TrainingArguments("out", use_cpu=True, neftune_noise_alpha=5.0)
    with pytest.raises(OptionError, match="^neftune_noise_alpha=5.0: embedding noise"):
        model_and_options("KTOTrainer", KTOConfig, "m", refusing)
