"""Options in Python: conversion, defaults, errors with key and value, and the properties that callbacks read."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from transformers.trainer_utils import IntervalStrategy

from alignment.compat.trl.verdicts import judged_names
from alignment.config.errors import OptionError
from alignment.config.fields import parse_optim_args
from alignment.config.registry import METHODS, option_names
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.dpo_options import DPOConfig
from alignment.methods.kto_options import KTOConfig
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.methods.reward_options import RewardConfig
from alignment.methods.sft_options import SFTConfig

pytestmark = pytest.mark.usefixtures("one_process")


def refused(cls: type, **options: Any) -> str:
    """Return the error message for invalid options, which is a single line."""
    with pytest.raises(OptionError) as caught:
        cls(**{"output_dir": "out", **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_home_is_expanded_in_output_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not expand `~` in `--output_dir=~/runs`."""
    monkeypatch.setenv("HOME", "/users/me")
    found = SFTConfig("~/runs/a~b", use_peft=True, merged_output_dir="~/merged")
    assert (found.output_dir, found.merged_output_dir) == ("/users/me/runs/a~b", "/users/me/merged")
    assert KTOConfig("runs/~").output_dir == "runs/~"


PART = {"dataset_name": "a"}
VLLM: dict[str, Any] = {"rollout_backend": "vllm"}
COLOCATE = VLLM | {"vllm_mode": "colocate"}
TRL_SERVER = {"vllm_server_host": "0.0.0.0", "vllm_server_port": 9000}
OF_REWARDS: dict[str, Any] = {
    **{"reward_model_path": "m", "reward_funcs": ["f.py:f"], "reward_weights": [1.0], "missing_eos_penalty": 0.0},
    **{"reward_load_in_4bit": False, "num_generations": 3},
}


@pytest.mark.parametrize(
    ("cls", "options", "keys"),
    [
        (KTOConfig, {"save_steps": 1.5}, "save_steps=1.5"),
        (KTOConfig, {"save_strategy": "best"}, "save_strategy='best'"),
        (KTOConfig, {"early_stopping_patience": 2}, "early_stopping_patience=2: requires evaluations"),
        (KTOConfig, {"early_stopping_threshold": 0.1}, "early_stopping_threshold=0.1: .*set early_stopping_patience"),
        (KTOConfig, {"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio=0.1 and warmup_steps=5"),
        (KTOConfig, {"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps=3"),
        (KTOConfig, {"bf16": True, "fp16": True}, "bf16=True and fp16=True"),
        (KTOConfig, {"dtype": "bfloat16", "bf16": False}, "dtype='bfloat16' and bf16=False"),
        (KTOConfig, {"optim": "sgd", "adam_beta1": 0.5}, "adam_beta1=0.5"),
        (KTOConfig, {"optim": "lion_8bit", "adam_epsilon": 1e-6}, "adam_epsilon=1e-06"),
        (KTOConfig, {"lora_r": 8}, "lora_r=8"),
        (KTOConfig, {"loss_type": "ktoo"}, "loss_type='ktoo'.*did you mean 'kto'"),
        (KTOConfig, {"truncation_mode": "keep_start_"}, "truncation_mode='keep_start_'.*'keep_start'"),
        (KTOConfig, {"ref_placement": "none"}, "ref_placement='none'"),
        (KTOConfig, {"desirable_weight": 0, "undesirable_weight": 0}, "desirable_weight=0.0 and undesirable_weight"),
        (CPOConfig, {"max_tokens_per_batch": 2000, "pack": False}, "max_tokens_per_batch=2000.*a pair.*2048"),
        (OnlineDPOConfig, {"max_tokens_per_batch": 575}, "max_tokens_per_batch=575.*a pair.*576"),
        (KTOConfig, {"per_device_train_batch_size": 1}, "gradient_accumulation_steps=1"),
        (KTOConfig, {"dataset_name": "a", "dataset_mixture": ["b"]}, "dataset_name='a' and dataset_mixture="),
        (DPOConfig, {"loss_type": "aot"}, "loss_type='aot'"),
        (DPOConfig, {"loss_type": ["sigmoid", "simpo"]}, r"loss_type=\['sigmoid', 'simpo'\].*unknown loss 'simpo'"),
        (DPOConfig, {"loss_type": []}, r"loss_type=\[\]"),
        (DPOConfig, {"loss_type": ["sigmoid", "exo_pair"]}, "label_smoothing=0.0.*loss_type='exo_pair'"),
        (DPOConfig, {"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing=0.5.*loss_type='robust'"),
        (DPOConfig, {"loss_type": "discopop", "discopop_tau": 0}, "discopop_tau=0.0"),
        (DPOConfig, {"label_smoothing": 0.1, "loss_type": "hinge"}, "label_smoothing=0.1.*loss_type='hinge'"),
        (DPOConfig, {"stratify_labels": True}, "stratify_labels=True"),
        (DPOConfig, {"loss_weights": [1, 2]}, r"loss_weights=\[1.0, 2.0\].*loss_type='sigmoid'"),
        (CPOConfig, {"simpo_gamma": 1.0}, "simpo_gamma=1.0.*loss_type='sigmoid'"),
        (CPOConfig, {"gamma_beta_ratio": 5}, "gamma_beta_ratio=5.0.*loss_type='sigmoid'"),
        (CPOConfig, {"alpha": 0, "loss_type": "alphapo"}, "alpha=0.0.*loss_type='alphapo'"),
        (OnlineDPOConfig, {"judge": "a.py:b", "reward_funcs": "x.py:f"}, "judge='a.py:b' and reward_funcs="),
        (OnlineDPOConfig, {"judge": {"model": "m"}, "reward_weights": [1]}, r"judge='m' and reward_weights=\[1.0\]"),
        (OnlineDPOConfig, {"max_length": None}, "max_length=None"),
        (OnlineDPOConfig, {"beta": [0.1, 0]}, r"beta=\[0.1, 0\].*greater than 0"),
        (OnlineDPOConfig, {"use_transformers_paged": True, "rollout_backend": "generate"}, "use_transformers_paged="),
        (CPOConfig, {"ref_model_name_or_path": "x"}, "ref_model_name_or_path='x'"),
        (KTOConfig, {"output_dir": ""}, "output_dir='': .*set a folder"),
        (KTOConfig, {"hang_timeout": 60, "hang_timeout_first": 59}, "hang_timeout_first="),
        (KTOConfig, {"max_bad_steps": 9}, "max_bad_steps="),
        (KTOConfig, {"save_steps": 9, "save_strategy": "epoch"}, "save_steps=9.*set save_strategy: steps"),
        (KTOConfig, {"retries": 0, "retry_pause": 9}, "retry_pause="),
        (KTOConfig, {"log_level": "inof"}, "log_level='inof': .*did you mean 'info'"),
        (KTOConfig, {"column_map": {"promt": "x"}}, "column_map=.*did you mean 'prompt'"),
        (KTOConfig, {"column_map": {"zzz": "x"}}, "column_map=.*expected one of prompt, completion, label"),
        (KTOConfig, {"column_map": {"prompt": "x", "completion": "x"}}, "column_map=.*'x' is mapped to both"),
        (KTOConfig, {"column_map": {"prompt": ["x", "y"]}}, "column_map=.*must be a valid string"),
        (SFTConfig, {"packing": True, "max_length": None}, "packing=True: requires max_length"),
        (SFTConfig, {"eval_packing": True, "max_length": None}, "eval_packing=True: requires max_length"),
        (SFTConfig, {"packing": True, "dataset_kwargs": {"skip_prepare_dataset": True}}, "packing=.*remove one"),
        (SFTConfig, {"packing": True, "packing_strategy": "ffd"}, "packing_strategy='ffd': must be 'bfd'"),
        *((OnlineDPOConfig, {"judge": "openai", name: value}, f".*{name}=") for name, value in OF_REWARDS.items()),
        (CPOConfig, {"deepspeed": {"optimizer": "AdamW"}}, ".*optimizer='AdamW': expected a mapping"),
        # Types.
        (KTOConfig, {"learning_rate": "fast"}, "learning_rate='fast': .*a valid number"),
        (KTOConfig, {"learning_rate": True}, "learning_rate=True: .*a valid number"),
        (KTOConfig, {"per_device_train_batch_size": 1.5}, "per_device_train_batch_size=1.5: .*a valid integer"),
        (KTOConfig, {"seed": None}, "seed=None: .*a valid integer"),
        (KTOConfig, {"run_name": "o\udcff"}, "run_name=.*: .*not valid UTF-8"),  # tokenizers cannot write to it
        (KTOConfig, {"model_init_kwargs": "{broken"}, "model_init_kwargs='{broken': invalid JSON"),
        (KTOConfig, {"model_init_kwargs": [1]}, r"model_init_kwargs=\[1\]: .*a valid dictionary"),
        (KTOConfig, {"deepspeed": 3}, "deepspeed=3: .*a valid dictionary or must be a valid string"),
        (KTOConfig, {"eval_strategy": "best"}, "eval_strategy='best': .*'no', 'steps' or 'epoch'"),
        # Mixtures.
        (KTOConfig, {"dataset_mixture": []}, "dataset_mixture: set at least one dataset"),
        (KTOConfig, {"dataset_mixture": [3]}, r"dataset_mixture\[0\].dataset_name=3: "),
        (KTOConfig, {"dataset_mixture": [{"weight": 1}]}, r"dataset_mixture\[0\]: dataset_name is missing"),
        (KTOConfig, {"dataset_mixture": [{**PART, "wight": 1}]}, r"dataset_mixture\[0\].wight=1: .*mean 'weight'"),
        (KTOConfig, {"dataset_mixture": [{**PART, "weight": "x"}]}, r"dataset_mixture\[0\].weight='x': "),
        (KTOConfig, {"dataset_mixture": {"a": 0}}, r"dataset_mixture\[0\].weight=0: must be greater than 0"),
        (KTOConfig, {"dataset_mixture": [{**PART, "weight": 1}, "b"]}, "dataset_mixture: .* every part or for none"),
        (KTOConfig, {"dataset_mixture": [{**PART, "column_map": {"text_a": "x"}}]}, r".*\[0\].column_map={'text_a'"),
        # Options of other methods and libraries.
        (KTOConfig, {"betta": 0.1}, "betta=0.1: .*did you mean 'beta'"),
        (KTOConfig, {"rollout_batch_size": 4}, "rollout_batch_size=4: .*an option of method online_dpo, not of kto"),
        (OnlineDPOConfig, {"max_prompt_length": 4}, "max_prompt_length=4: .*an option of method kto"),
        (KTOConfig, {"zzz": 1}, "zzz=1: .*--help"),
        (KTOConfig, {"method": "cpo"}, "method='cpo'"),
        (KTOConfig, {"sync_ref_model": True}, "sync_ref_model=True: "),
        (
            KTOConfig,
            {"activation_offloading": True, "gradient_checkpointing": False},
            "activation_offloading=True and gradient_checkpointing=False: only hidden states of recomputed",
        ),
        (
            KTOConfig,
            {"auto_find_batch_size": True, "memory_rehearsal": False},
            "auto_find_batch_size=True and memory_r",
        ),
        (KTOConfig, {"gradient_checkpointing": "some"}, "gradient_checkpointing='some': must be true, false or auto"),
        (KTOConfig, {"fsdp": "full_shard"}, "fsdp='full_shard': FSDP is not supported; set deepspeed to zero3"),
        (KTOConfig, {"torch_compile": True}, "torch_compile=True: torch.compile is not supported"),
        (KTOConfig, {"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0: embedding noise \(NEFTune\) is not"),
        (KTOConfig, {"accelerator_config": {"split_batches": True}}, "accelerator_config=.*split nor dispatched"),
        (KTOConfig, {"bf16_full_eval": True, "use_cpu": True}, "bf16_full_eval=.* compute dtype of training"),
        (KTOConfig, {"is_encoder_decoder": True}, "is_encoder_decoder=.*use a causal language model"),
        (KTOConfig, {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy=.* 'sequential'"),
        (KTOConfig, {"train_sampling_strategy": "sequential", "stratify_labels": True}, "train_.*remove one of them"),
        (DPOConfig, {"ld_alpha": 0.5}, r"ld_alpha=.*length desensitization \(LD-DPO\) weights single tokens"),
        (DPOConfig, {"reference_free": True}, "reference_free=.*DPO requires a reference"),
        (DPOConfig, {"padding_free": True, "pack": False}, "padding_free=True and pack='false': they contradict each"),
        (
            KTOConfig,
            {"pack": True, "attn_implementation": "eager"},
            "pack='true' and attn_implementation='eager'.*own",
        ),
        (
            OnlineDPOConfig,
            {"use_vllm": True, "use_transformers_paged": True},
            "use_vllm=True and rollout_backend='cont",
        ),
        (OnlineDPOConfig, {"vllm_server_port": 8001}, "vllm_server_port=8001: .*rollout_backend: auto; remove it"),
        (OnlineDPOConfig, VLLM | {"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True: .*vllm_mode: server"),
        (OnlineDPOConfig, VLLM | {"rollout_batch_size": 2}, "rollout_batch_size=2: has no effect"),
        (OnlineDPOConfig, VLLM | {"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False and rollout_"),
        (OnlineDPOConfig, VLLM | {"vllm_max_model_length": 511}, "vllm_max_model_length=511 and max_length=512"),
        (OnlineDPOConfig, VLLM | {"vllm_server_base_url": "http://h", "vllm_server_port": 1}, "vllm_server_port=1: "),
        (OnlineDPOConfig, VLLM | {"vllm_server_base_url": "http://me:s3cret@h"}, "vllm_server_base_url: (?!.*s3cret)"),
        (OnlineDPOConfig, VLLM | {"vllm_server_base_url": "http://h:8000/v1"}, "vllm_server_base_url: .*without a pa"),
        (OnlineDPOConfig, COLOCATE | {"vllm_server_host": "h"}, "vllm_server_host='h': .*vllm_mode: colocate"),
        (OnlineDPOConfig, COLOCATE | {"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2: .*mode: server"),
        (
            OnlineDPOConfig,
            COLOCATE | {"vllm_enable_sleep_mode": True, "use_cpu": True},
            "vllm_enable_sleep_mode=True and use_cpu=True",
        ),
        (OnlineDPOConfig, {"vllm_structured_outputs_regex": "a"}, "vllm_structured_outputs_regex='a': constrained"),
        (KTOConfig, {"max_seq_length": 7, "max_length": 8}, "max_seq_length=7 and max_length=8 contradict each other"),
        (KTOConfig, {"model_init_kwargs": {"dtype": "float16"}, "dtype": "bfloat16"}, ".*contradicts the option dty"),
        (KTOConfig, {"model_init_kwargs": {"device_map": {"": "cpu"}}}, ".*DeepSpeed places the model"),
        (KTOConfig, {"ref_model_init_kwargs": {"attn_implementation": "eager"}}, ".*option attn_implementation"),
    ],
)
def test_refused_values(cls: type, options: dict[str, Any], keys: str) -> None:
    assert re.match(keys, message := refused(cls, **options)), message


def test_the_default_output_dir_matches_transformers() -> None:
    assert KTOConfig().output_dir == KTOConfig(output_dir=None).output_dir == "trainer_output"


def test_every_default_of_the_feature_list() -> None:
    for options in (KTOConfig("out"), CPOConfig("out")):
        assert (options.max_length, options.window_size, options.gradient_accumulation_steps) == (1024, 8, 1)
        assert (options.learning_rate, options.num_train_epochs, options.max_grad_norm) == (1e-6, 3.0, 1.0)
        assert (options.lr_scheduler_type, options.seed, options.beta) == ("linear", 42, 0.1)
        assert options.gradient_checkpointing == "auto" and options.disable_dropout is True
    assert DPOConfig("out").losses == [("sigmoid", 1.0)]
    several = DPOConfig("out", loss_type=["sigmoid", "bco_pair", "sft"], label_smoothing=0.1)  # type: ignore[arg-type]
    assert several.losses == [("sigmoid", 1.0), ("bco_pair", 1.0), ("sft", 1.0)]
    assert DPOConfig("out", loss_weights="0.5").loss_weights == [0.5]  # type: ignore[arg-type]
    weighted = DPOConfig("out", loss_type=["ipo", "sft"], loss_weights=[0.8, 0.2])  # type: ignore[arg-type]
    assert weighted.losses == [("ipo", 0.8), ("sft", 0.2)]


STAGE_3 = {"zero_optimization": {"stage": 3}}
CHECKPOINTING = {"gradient_checkpointing": True}
NO_CHECKPOINTING = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("cls", "given", "expected"),
    [
        (KTOConfig, {}, {"metric_for_best_model": None, "greater_is_better": None}),
        (KTOConfig, {"load_best_model_at_end": True}, {"metric_for_best_model": "loss", "greater_is_better": False}),
        (KTOConfig, {"early_stopping_patience": 2}, {"metric_for_best_model": "loss", "greater_is_better": False}),
        (KTOConfig, {"metric_for_best_model": "eval_rewards/margins"}, {"greater_is_better": True}),
        (DPOConfig, {"precompute_ref_log_probs": True}, {"ref_placement": "precomputed"}),
        (CPOConfig, {"pack": True}, {"pack": "true"}),
        (CPOConfig, {"padding_free": True}, {"pack": "true"}),
        (OnlineDPOConfig, {"beta": [0.2, 0.1]}, {"betas": (0.2, 0.1)}),
        (OnlineDPOConfig, {"max_windows_without_pairs": None}, {"max_windows_without_pairs": None}),
        (SFTConfig, {"loss_type": None}, {"loss_type": "nll"}),
        (SFTConfig, {"packing": True, "packing_strategy": "bfd-requeue"}, {"packing_strategy": "bfd_split"}),
        (CPOConfig, {}, {"alpha": 0.0, "cpo_alpha": 1.0}),
        (CPOConfig, {"loss_type": "simpo"}, {"alpha": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5}),
        (CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "alpha": 0.1}, {"alpha": 0.1, "cpo_alpha": 0.0}),
        (CPOConfig, {"loss_type": "simpo", "gamma_beta_ratio": 0.5, "beta": 2.0}, {"simpo_gamma": 1.0}),
        (CPOConfig, {"loss_type": "alphapo"}, {"alpha": 0.25, "cpo_alpha": 0.0}),
        (CPOConfig, {"loss_type": "alphapo", "alpha": -0.5, "cpo_alpha": 0.2}, {"alpha": -0.5, "cpo_alpha": 0.2}),
        (KTOConfig, {"per_device_train_batch_size": 3}, {"per_device_eval_batch_size": 3, "eval_batch_size": 3}),
        (KTOConfig, {"per_device_eval_batch_size": 5}, {"train_batch_size": 8, "eval_batch_size": 5}),
        (KTOConfig, {"logging_steps": 7}, {"eval_steps": 7}),
        (KTOConfig, {"logging_steps": 7, "eval_steps": 2}, {"eval_steps": 2}),
        # Conversions.
        (KTOConfig, {"learning_rate": "5e-7"}, {"learning_rate": 5e-7}),
        (KTOConfig, {"per_device_train_batch_size": 4.0}, {"per_device_train_batch_size": 4}),
        (KTOConfig, {"bf16": "none"}, {"bf16": None}),
        (KTOConfig, {"gradient_checkpointing": "yes"}, {"gradient_checkpointing": True}),
        (KTOConfig, {"gradient_checkpointing": "Auto"}, {"gradient_checkpointing": "auto"}),
        (KTOConfig, {"max_completion_length": "null"}, {"max_completion_length": None}),
        (KTOConfig, {"model_init_kwargs": '{"a": [1, 2]}'}, {"model_init_kwargs": {"a": [1, 2]}}),
        (KTOConfig, {"deepspeed": json.dumps(STAGE_3)}, {"deepspeed": STAGE_3}),
        (KTOConfig, {"deepspeed": Path("zero2.json")}, {"deepspeed": "zero2.json"}),
        (KTOConfig, {"save_strategy": False}, {"save_strategy": "no"}),
        (KTOConfig, {"save_strategy": IntervalStrategy.EPOCH}, {"save_strategy": "epoch"}),
        (KTOConfig, {"save_steps": 0.1}, {"save_steps": 0.1}),
        (KTOConfig, {"save_steps": "10.0"}, {"save_steps": 10}),
        (KTOConfig, {"eval_steps": "none"}, {"eval_steps": 10}),
        (KTOConfig, {"resume_from_checkpoint": False}, {"resume_from_checkpoint": ""}),
        (KTOConfig, {"resume_from_checkpoint": "true"}, {"resume_from_checkpoint": "latest"}),
        # Names and values of other libraries.
        (KTOConfig, {"max_seq_length": 7}, {"max_length": 7}),
        (KTOConfig, {"max_length": None}, {"max_length": None}),
        (KTOConfig, {"activation_checkpointing": False}, {"gradient_checkpointing": False}),
        (KTOConfig, CHECKPOINTING | {"activation_checkpointing": None}, CHECKPOINTING),
        (KTOConfig, NO_CHECKPOINTING, NO_CHECKPOINTING),
        (KTOConfig, {"no_cuda": True, "use_cpu": "true"}, {"use_cpu": True}),
        (KTOConfig, {"report_to": None}, {"report_to": "none"}),
        (KTOConfig, {"include_num_input_tokens_seen": "all"}, {"include_num_input_tokens_seen": True}),
        (KTOConfig, {"save_total_limit": 0}, {"save_total_limit": None}),
        (KTOConfig, {"save_total_limit": "-1"}, {"save_total_limit": None}),
        (KTOConfig, {"max_grad_norm": None}, {"max_grad_norm": 0.0}),
        (KTOConfig, {"push_to_hub_model_id": "me/it"}, {"hub_model_id": "me/it"}),
        (KTOConfig, {"push_to_hub_token": None, "hub_token": "s3cret"}, {"hub_token": "s3cret"}),
        (OnlineDPOConfig, {"top_k": None}, {"top_k": 0}),
        (OnlineDPOConfig, {"top_k": "-1"}, {"top_k": 0}),
        (OnlineDPOConfig, {"use_transformers_paged": True}, {"rollout_backend": "continuous"}),
        (OnlineDPOConfig, {"use_vllm": True}, {"rollout_backend": "vllm", "vllm_url": "http://127.0.0.1:8000"}),
        (OnlineDPOConfig, VLLM | TRL_SERVER, {"vllm_url": "http://127.0.0.1:9000"}),
        (OnlineDPOConfig, VLLM | {"vllm_server_base_url": "http://h:1/"}, {"vllm_url": "http://h:1"}),
        (OnlineDPOConfig, VLLM | {"gpu_memory_utilization": 0.3}, {"vllm_gpu_memory_utilization": 0.3}),
        (OnlineDPOConfig, {"judge": "openai", "num_generations": 2}, {"num_generations": 2}),
        (KTOConfig, {"model_init_kwargs": {"torch_dtype": "bfloat16"}}, {"dtype": "bfloat16"}),
        (KTOConfig, {"model_init_kwargs": {"dtype": "float32"}}, {"dtype": None}),
        (KTOConfig, {"model_init_kwargs": {"dtype": "auto", "load_in_4bit": True}}, {"load_in_4bit": True}),
        (KTOConfig, {"model_init_kwargs": {"dtype": "float32"}, "bf16": False}, {"dtype": "float32"}),
        (KTOConfig, {"model_init_kwargs": '{"attn_implementation": "eager"}'}, {"attn_implementation": "eager"}),
    ],
)
def test_resolved_values(cls: type, given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = cls("out", **{"eval_strategy": "steps", **given})
    found = {name: getattr(options, name) for name in expected}
    assert found == expected and [*map(type, found.values())] == [*map(type, expected.values())]


def test_window_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KTOConfig("out", per_device_train_batch_size=1, gradient_accumulation_steps=2).window_size == 2
    assert KTOConfig("out", per_device_train_batch_size=1, loss_type="apo_zero_unpaired").window_size == 1
    assert CPOConfig("out", per_device_train_batch_size=1).window_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert KTOConfig("out", per_device_train_batch_size=1).window_size == 2


def test_process_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    options = KTOConfig("out")
    assert (options.process_index, options.local_process_index, options.world_size, options.n_gpu) == (0, 0, 1, 0)
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert (options.process_index, options.local_process_index, options.world_size) == (3, 1, 4)
    assert options.window_size == 32
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(OptionError, match="WORLD_SIZE='many'"):
        _ = options.world_size


def test_to_dict_masks_the_token() -> None:
    options = KTOConfig("out", model_init_kwargs={"a": 1})
    options.hub_token = "hf_secret"
    values = options.to_dict()
    assert values["method"] == "kto" and values["hub_token"] == "<HUB_TOKEN>" and values["save_strategy"] == "steps"
    assert type(values["save_strategy"]) is str
    assert set(values) == option_names(KTOConfig) - judged_names(KTOConfig) | {"method"}
    assert json.loads(options.to_json_string()) == values
    sanitized = options.to_sanitized_dict()
    assert sanitized["model_init_kwargs"] == "{'a': 1}" and sanitized["train_batch_size"] == 8
    assert all(isinstance(value, (bool, int, float, str)) for value in sanitized.values())
    assert "hf_secret" not in options.to_json_string() + str(sanitized)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ({"momentum": 0.9}, {"momentum": 0.9}),
        ("betas=(0.9, 0.95),eps=1e-6", {"betas": (0.9, 0.95), "eps": 1e-6}),
        ("foreach=none,name=fast,n=3", {"foreach": None, "name": "fast", "n": 3}),
    ],
)
def test_optim_args(text: Any, expected: dict[str, Any]) -> None:
    assert parse_optim_args(text) == expected
    for bad in ("momentum", "momentum=", "a=1,a=2", "=1"):
        with pytest.raises(OptionError, match=f"^optim_args='{bad}'"):
            parse_optim_args(bad)


def test_nothing_heavy_is_imported() -> None:
    """Neither by a bad command line nor by the options of any method with its losses."""
    names = sorted(options.partition(":")[0] for options, _ in METHODS.entries.values())
    code = (
        "import importlib, sys; from alignment.cli.parsing import parse\n"
        "from alignment.config.errors import OptionError\n"
        "try: parse(['kto', '--betta', '1'])\n"
        "except OptionError: pass\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "assert not {'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


TINY, ALMOST_ONE = math.ulp(0.0), math.nextafter(1, 0)
BELOW_ZERO, ABOVE_ONE = -TINY, math.nextafter(1, 2)
AT_LEAST_ONE = [
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("dataset_num_proc", "max_train_samples", "max_eval_samples", "max_steps", "lora_r"),
    *("lora_alpha", "max_bad_steps", "early_stopping_patience"),
]
AT_LEAST_ZERO = [
    *("learning_rate", "weight_decay", "max_grad_norm", "router_aux_loss_coef", "warmup_steps", "eval_delay"),
    *("retry_pause", "early_stopping_threshold"),
]
ABOVE_ZERO = ["adam_epsilon", "hang_timeout", "hang_factor", "num_train_epochs"]
NEEDS: dict[str, dict[str, Any]] = {  # options with which another one has an effect
    "per_device_train_batch_size": {"loss_type": "apo_zero_unpaired"},
    "lora_r": {"use_peft": True},
    "lora_alpha": {"use_peft": True},
    "lora_dropout": {"use_peft": True},
    "max_bad_steps": {"on_bad_step": "skip"},
    "early_stopping_patience": {"eval_strategy": "epoch"},
    "early_stopping_threshold": {"eval_strategy": "epoch", "early_stopping_patience": 1},
}
LIMITS: list[tuple[type, str, Any, Any]] = [
    *((KTOConfig, name, 1, 0) for name in AT_LEAST_ONE),
    *((KTOConfig, name, 0, BELOW_ZERO) for name in AT_LEAST_ZERO),
    *((KTOConfig, name, 0, -1) for name in ("dataloader_num_workers", "seed", "data_seed", "retries")),
    *((KTOConfig, name, TINY, 0) for name in ABOVE_ZERO),
    *((KTOConfig, name, ALMOST_ONE, 1) for name in ("adam_beta1", "adam_beta2", "warmup_ratio", "lora_dropout")),
    *((KTOConfig, name, 0, BELOW_ZERO) for name in ("adam_beta1", "adam_beta2", "warmup_ratio", "lora_dropout")),
    *((KTOConfig, name, ALMOST_ONE, 1.5) for name in ("logging_steps", "save_steps", "eval_steps", "warmup_steps")),
    *((KTOConfig, name, 1, 0) for name in ("logging_steps", "save_steps", "eval_steps")),
    (KTOConfig, "max_steps", -1, -2),
    (KTOConfig, "save_total_limit", 1, -2),  # 0 and -1: no limit, as in transformers
    (KTOConfig, "seed", 2**32 - 1, 2**32),
    (KTOConfig, "peer_timeout", 5, math.nextafter(5, 0)),
    (KTOConfig, "loss_spike_factor", ABOVE_ONE, 1),
    (KTOConfig, "max_length", 2, 1),
    (KTOConfig, "max_tokens_per_batch", 1024, 1023),
    (CPOConfig, "max_tokens_per_batch", 1024, 1023),
    *((cls, "beta", TINY, 0) for cls in (KTOConfig, CPOConfig, DPOConfig, OnlineDPOConfig)),
    *((KTOConfig, name, 0, BELOW_ZERO) for name in ("desirable_weight", "undesirable_weight")),
    *((cls, "label_smoothing", math.nextafter(0.5, 0), 0.5) for cls in (CPOConfig, DPOConfig)),
    *((cls, "label_smoothing", 0, BELOW_ZERO) for cls in (CPOConfig, DPOConfig)),
    (CPOConfig, "cpo_alpha", 0, BELOW_ZERO),
    (RewardConfig, "center_rewards_coefficient", 0, BELOW_ZERO),
    *((OnlineDPOConfig, name, 1, 0) for name in ("max_new_tokens", "rollout_batch_size", "reward_batch_size")),
    *((OnlineDPOConfig, name, 1, 0) for name in ("num_completions_to_log", "max_windows_without_pairs", "top_p")),
    *((OnlineDPOConfig, name, 0, -2) for name in ("top_k", "log_completions")),
    *((OnlineDPOConfig, name, TINY, 0) for name in ("repetition_penalty", "temperature", "top_p")),
    *((OnlineDPOConfig, name, 1, ABOVE_ONE) for name in ("top_p", "min_p")),
    *((OnlineDPOConfig, name, 0, BELOW_ZERO) for name in ("min_p", "missing_eos_penalty")),
    (OnlineDPOConfig, "num_generations", 2, 1),
    (OnlineDPOConfig, "max_length", 65, 64),
]


@pytest.mark.parametrize(("cls", "name", "last", "beyond"), LIMITS)
def test_the_last_value_within_a_limit_and_the_first_beyond(cls: type, name: str, last: Any, beyond: Any) -> None:
    further = NEEDS.get(name, {})
    assert getattr(cls("out", **{name: last}, **further), name) == last
    with pytest.raises(OptionError) as caught:
        cls("out", **{name: beyond}, **further)
    assert str(caught.value).startswith((f"{name}={beyond!r}", f"{name}={float(beyond)!r}"))
