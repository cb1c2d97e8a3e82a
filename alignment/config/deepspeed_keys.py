"""The keys of a DeepSpeed JSON that are accepted: a list of top-level keys, and for sections, DeepSpeed's models.

DeepSpeed ignores unknown top-level keys, so a typo would go unnoticed.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from alignment.config.errors import OptionError, did_you_mean, setting, type_name
from alignment.config.fields import words
from alignment.internals.deepspeed import section_models

_ZERO = "zero_optimization."
_DTYPES = "dtypes are set by the options bf16, fp16 and dtype; remove it"
# The accepted keys by type; None: validated elsewhere, by DeepSpeed's models or by the plan.
TOP_LEVEL: dict[str, type | None] = {
    name: kind
    for kind, names in (
        (None, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"),
        (None, "communication_data_type seq_parallel_communication_data_type zero_optimization bf16 fp16 data_types"),
        (bool, "disable_python_gc dump_state memory_breakdown wall_clock_breakdown"),
        (bool, "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
        (int, "steps_per_print vocabulary_size"),
        (str, "log_level"),
        (dict, "checkpoint comms_logger compile datastates_ckpt flops_profiler timers"),
    )
    for name in words(names)
}
# Sections for which DeepSpeed has no model.
_SECTIONS = {"timers": {"throughput"}, "data_types": {"grad_accum_dtype", "buffer_dtype", "keep_in_fp32_modules"}}

# Of further keys that would be ignored, or make the results wrong, those of sections, and those with a replacement.
REFUSED: dict[str, str] = {
    f"{section}{name}": why
    for section, names, why in (
        ("", "optimizer scheduler", "only the policy's engine has one; remove the section"),
        ("", "bfloat16", "it is ignored if bf16 is present; use bf16"),
        ("", "activation_checkpointing", "transformers models ignore it; set gradient_checkpointing"),
        ("", "tensorboard wandb csv_monitor comet", "it logs a loss that is scaled; remove it and use report_to"),
        ("", "dataloader_drop_last", "set the option dataloader_drop_last instead"),
        ("", "torch_autocast amp data_types.param_dtype fp16.auto_cast", _DTYPES),
        ("fp16.", "fp16_master_weights_and_grads", "it requires DeepSpeed's CPU Adam; remove it"),
        (
            _ZERO,
            "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
            "DeepSpeed no longer reads it; remove it",
        ),
        (_ZERO, "zenflow", "it is not supported; remove it"),
        (_ZERO, "compute_grad_norm", "the gradient norm is always logged; remove it"),
        (_ZERO, "zero_quantized_nontrainable_weights", "it is not reliable in bf16; remove it"),
        (_ZERO, "cpu_offload cpu_offload_param cpu_offload_use_pin_memory", "use offload_optimizer or offload_param"),
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
        OptionError: an unknown or unsupported key; the message names its value and the closest known key.
    """
    models = section_models().items()
    known = {path: {each.alias or name for name, each in model.model_fields.items()} for path, model in models}
    for section, names in {"": {*TOP_LEVEL}, **known, **_SECTIONS}.items():
        content = value_at(config, section) if section else config
        if content is not None and not isinstance(content, dict):
            raise OptionError(f"{where}: {section}={content!r}: expected an object with keys such as {min(names)!r}")
        for key, value in (content or {}).items():
            path = f"{section}.{key}" if section else key
            text = f"{where}: {setting(path, value)}"
            if path in REFUSED:
                raise OptionError(f"{text}: not supported: {REFUSED[path]}")
            if key not in names:
                near = "; write it as nested objects" if "." in key else did_you_mean(key, names) or "; remove it"
                raise OptionError(f"{text}: no such key, or not supported here{near}")


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
            path, reason = ".".join(map(str, (section, *first["loc"]))), " ".join(first["msg"].split())
            raise OptionError(f"{where}: {path}={first['input']!r}: {reason}; correct or remove it") from None
    for name, kind in TOP_LEVEL.items():
        if kind is not None and name in config and type(config[name]) is not kind:
            raise OptionError(f"{where}: {setting(name, config[name])}: expected {type_name(kind())}; correct it")
