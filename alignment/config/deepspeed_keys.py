"""The keys of a DeepSpeed JSON: those that DeepSpeed reads, and those that are rejected here, with reasons.

DeepSpeed ignores unknown top-level keys, so a typo would go unnoticed. The keys of sections are those of DeepSpeed's
models; a test compares the top-level keys with the installed DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from alignment.config.errors import OptionError, did_you_mean, setting, type_name
from alignment.config.fields import words
from alignment.internals.deepspeed import section_models

_ZERO = "zero_optimization."
_GONE = "DeepSpeed no longer reads it; remove it"
# The accepted keys and their types; None: validated elsewhere, by DeepSpeed's models or by the plan.
TOP_LEVEL: dict[str, type | None] = {
    **dict.fromkeys(
        words(
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
            "communication_data_type seq_parallel_communication_data_type zero_optimization bf16 fp16 data_types"
        )
    ),
    **dict.fromkeys(
        words(
            "disable_python_gc dump_state memory_breakdown wall_clock_breakdown zero_allow_untested_optimizer "
            "zero_force_ds_cpu_optimizer"
        ),
        bool,
    ),
    **dict.fromkeys(words("steps_per_print vocabulary_size"), int),
    "log_level": str,
    **dict.fromkeys(words("checkpoint comms_logger compile datastates_ckpt flops_profiler timers"), dict),
}
# Sections for which DeepSpeed has no model.
_SECTIONS = {"timers": {"throughput"}, "data_types": {"grad_accum_dtype", "buffer_dtype", "keep_in_fp32_modules"}}

# Keys that would be ignored, or that would make the results wrong, by section, and what to do.
REFUSED: dict[str, str] = {
    f"{section}{name}": why
    for section, names, why in (
        ("", "optimizer scheduler", "only the policy's engine has one; remove the section"),
        ("", "bfloat16", "it is ignored if bf16 is present; use bf16"),
        ("", "activation_checkpointing", "transformers models ignore it; set gradient_checkpointing"),
        ("", "tensorboard wandb csv_monitor comet", "it logs a loss that is scaled; remove it and use report_to"),
        ("", "pipeline tensor_parallel expert_parallel", "only data parallelism is supported; remove it"),
        ("", "sequence_parallel_size use_data_before_expert_parallelism", "only data parallelism is supported"),
        ("", "hybrid_engine weight_quantization autotuning aio", "it is not supported; remove it"),
        ("", "data_efficiency", "rows are not loaded by DeepSpeed; remove it"),
        ("", "dataloader_drop_last", "set the option dataloader_drop_last instead"),
        ("", "torch_autocast amp", "dtypes are set by the options bf16, fp16 and dtype; remove it"),
        ("data_types.", "param_dtype", "dtypes are set by the options bf16, fp16 and dtype; remove it"),
        ("fp16.", "auto_cast", "dtypes are set by the options bf16, fp16 and dtype; remove it"),
        ("", "prescale_gradients gradient_predivide_factor", "it would change the scale of the gradient; remove it"),
        ("", "gradient_allreduce_op", "it would change the scale of the gradient; remove it"),
        ("", "managed_gradient_accumulation", "the training loop sets the accumulation boundary; remove it"),
        ("", "disable_allgather nebula compression_training quantize_training sparse_gradients eigenvalue", _GONE),
        ("", "sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop", _GONE),
        (_ZERO, "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param", _GONE),
        (_ZERO, "zenflow", "it is not supported; remove it"),
        (_ZERO, "compute_grad_norm", "the gradient norm is always logged; remove it"),
        (_ZERO, "zero_quantized_nontrainable_weights", "it is not reliable in bf16; remove it"),
        (_ZERO, "cpu_offload", 'use "offload_optimizer": {"device": "cpu"} instead'),
        (_ZERO, "cpu_offload_param", 'use "offload_param": {"device": "cpu"} instead'),
        (_ZERO, "cpu_offload_use_pin_memory", "use pin_memory in offload_param or offload_optimizer instead"),
        (_ZERO, "stage3_gather_fp16_weights_on_model_save", "use stage3_gather_16bit_weights_on_model_save instead"),
        (_ZERO, "offload_param.nvme_path offload_optimizer.nvme_path", "NVMe offload is not supported yet; set cpu"),
        (f"{_ZERO}offload_optimizer.", "ratio super_offload cpuadam_cores_perc", "it requires DeepSpeed's CPU Adam"),
    )
    for name in words(names)
}


def value_at(config: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None if it is absent."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def set_at(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, creating missing sections."""
    *sections, last = path.split(".")
    for part in sections:
        config = config.setdefault(part, {})
    config[last] = value


def check_keys(config: dict[str, Any], where: str) -> None:
    """Reject keys that DeepSpeed would ignore or that would change the results.

    Raises:
        OptionError: a dotted, unknown or unsupported key; the message names its value and the closest known key.
    """
    for key, value in config.items():
        if "." in key:
            nested: dict[str, Any] = {}
            set_at(nested, key, value)
            raise OptionError(f"{where}: {key}={value!r}: DeepSpeed ignores dotted keys; write {json.dumps(nested)}")
        _check_key(key, key, value, TOP_LEVEL, where)
    known = {path: {*model.model_fields, *_aliases(model).values()} for path, model in section_models().items()}
    for section, names in {**known, **_SECTIONS}.items():
        content = value_at(config, section)
        if content is None:
            continue
        if not isinstance(content, dict):
            raise OptionError(f"{where}: {section}={content!r}: expected an object with keys such as {min(names)!r}")
        for key, value in content.items():
            _check_key(key, f"{section}.{key}", value, names, where)


def _check_key(key: str, path: str, value: Any, known: Collection[str], where: str) -> None:
    text = f"{where}: {setting(path, value)}"
    if path in REFUSED:
        raise OptionError(f"{text}: not supported: {REFUSED[path]}")
    if key not in known:
        raise OptionError(f"{text}: DeepSpeed has no such key{did_you_mean(key, known) or '; remove it'}")


def _aliases(model: Any) -> dict[str, str]:
    """Return the names of a model's fields that have another name in the JSON, with that name."""
    return {name: field.alias for name, field in model.model_fields.items() if field.alias}


def with_full_names(config: dict[str, Any], where: str) -> None:
    """Replace the short names of ZeRO-3's keys by their full names, in place."""
    zero = config.get("zero_optimization", {})
    for short, full in _aliases(section_models()["zero_optimization"]).items():
        if short in zero and full in zero:
            raise OptionError(
                f"{where}: zero_optimization.{short}={zero[short]!r} is an alias of {full}; remove one of them"
            )
        if short in zero:
            zero[full] = zero.pop(short)


def check_values(config: dict[str, Any], where: str) -> None:
    """Validate the sections with DeepSpeed's own models, so that errors are reported before an engine is built.

    Raises:
        OptionError: a value that DeepSpeed would reject.
    """
    for section, model in section_models().items():
        try:
            model(**(value_at(config, section) or {}))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, (section, *first["loc"])))
            reason = " ".join(first["msg"].split())
            raise OptionError(f"{where}: {path}={first['input']!r}: {reason}; correct or remove it") from None
    for name, kind in TOP_LEVEL.items():
        if kind is not None and name in config and type(config[name]) is not kind:
            wanted = type_name(kind())
            raise OptionError(f"{where}: {setting(name, config[name])}: expected {wanted}; correct or remove it")
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        if config.get(key) not in (None, "fp32", "fp16", "bf16"):
            raise OptionError(f'{where}: {key}={config[key]!r}: set "fp32", "fp16" or "bf16"')
