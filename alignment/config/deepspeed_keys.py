"""The keys of a DeepSpeed JSON: those that DeepSpeed reads, and those that are rejected here, with reasons.

DeepSpeed ignores unknown top-level keys, so a typo would go unnoticed. A test compares these lists with the installed
DeepSpeed.
"""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError, did_you_mean, setting, type_name
from alignment.config.fields import words
from alignment.internals.deepspeed import section_models

TOP_LEVEL = frozenset(
    words(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation steps_per_print dump_state disable_python_gc disable_allgather "
        "communication_data_type seq_parallel_communication_data_type prescale_gradients "
        "gradient_predivide_factor gradient_allreduce_op zero_optimization activation_checkpointing "
        "comms_logger tensorboard wandb csv_monitor comet gradient_clipping fp16 bf16 bfloat16 torch_autocast "
        "optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler "
        "wall_clock_breakdown memory_breakdown autotuning use_data_before_expert_parallelism hybrid_engine "
        "pipeline data_efficiency checkpoint data_types aio dataloader_drop_last log_level datastates_ckpt "
        "weight_quantization compile timers tensor_parallel expert_parallel sequence_parallel_size "
        "vocabulary_size"
    )
)

# Short names that DeepSpeed also accepts, and the full names that are written.
STAGE3_SHORT = {
    short: f"stage3_{short}"
    for short in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
}

# Types of the top-level keys that DeepSpeed does not validate; a wrong type would fail later, or not at all.
_TOP_LEVEL_TYPES: dict[type, tuple[str, ...]] = {
    bool: words(
        "disable_python_gc dump_state memory_breakdown wall_clock_breakdown zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer"
    ),
    int: words("steps_per_print vocabulary_size"),
    str: words("log_level"),
    dict: words("checkpoint comms_logger compile datastates_ckpt flops_profiler timers"),
}

SECTIONS: dict[str, frozenset[str]] = {
    "zero_optimization": frozenset(
        words(
            "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
            "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
            "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param "
            "cpu_offload_use_pin_memory cpu_offload stage3_gather_fp16_weights_on_model_save "
            "ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment "
            "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
            "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
            "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module"
        )
    )
    | set(STAGE3_SHORT)
    | set(STAGE3_SHORT.values()),
    "zero_optimization.offload_param": frozenset(
        words("device nvme_path buffer_count buffer_size max_in_cpu pin_memory")
    ),
    "zero_optimization.offload_optimizer": frozenset(
        words(
            "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload "
            "cpuadam_cores_perc"
        )
    ),
    "zero_optimization.leaf_module": frozenset({"classes", "names", "name_suffixes"}),
    "bf16": frozenset(
        words("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states")
    ),
    "fp16": frozenset(
        words(
            "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale fp16_master_weights_and_grads"
        )
    ),
    "timers": frozenset({"throughput"}),
    "timers.throughput": frozenset({"enabled", "synchronized"}),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
}

_MONITOR = "DeepSpeed's monitors log a loss that is scaled for gradient accumulation; remove it and use report_to"
_PARALLEL = "only data parallelism is supported; remove it"
_SCALING = "it would change the scale of the gradient; remove it"
_NVME = "NVMe offload is not supported yet; remove it and set device to cpu"
_CPU_ADAM = "it requires DeepSpeed's CPU Adam, which is not supported yet; remove it"
_DTYPE = "dtypes are set by the options bf16, fp16 and dtype; remove it"
_GONE = "it has been removed from DeepSpeed; remove it"
_OFFLOAD_OPTIMIZER = 'use "offload_optimizer": {"device": "cpu"} instead'

# Keys that would be ignored, or that would make the results wrong.
REFUSED: dict[str, str] = {
    "optimizer": "only the policy's engine has an optimizer; remove the section",
    "scheduler": "only the policy's engine has a schedule; remove the section",
    "bfloat16": "it is ignored if bf16 is present; use bf16",
    "activation_checkpointing": "transformers models ignore it; set gradient_checkpointing",
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "pipeline": _PARALLEL,
    "tensor_parallel": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "use_data_before_expert_parallelism": _PARALLEL,
    "hybrid_engine": "it supports a few older architectures only; remove it",
    "data_efficiency": "rows are not loaded by DeepSpeed; remove it",
    "dataloader_drop_last": "set the option dataloader_drop_last instead",
    "autotuning": "it requires DeepSpeed's own tuning launcher; remove it",
    "weight_quantization": "DeepSpeed's weight quantization is not supported; remove it",
    "torch_autocast": _DTYPE,
    "data_types.param_dtype": _DTYPE,
    "fp16.auto_cast": _DTYPE,
    "prescale_gradients": _SCALING,
    "gradient_predivide_factor": _SCALING,
    "gradient_allreduce_op": _SCALING,
    "managed_gradient_accumulation": "the training loop sets the accumulation boundary; remove it",
    "disable_allgather": "DeepSpeed no longer reads it; remove it",
    "aio": _NVME,
    "zero_optimization.offload_param.nvme_path": _NVME,
    "zero_optimization.offload_optimizer.nvme_path": _NVME,
    "zero_optimization.offload_optimizer.ratio": _CPU_ADAM,
    "zero_optimization.offload_optimizer.super_offload": _CPU_ADAM,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _CPU_ADAM,
    "zero_optimization.zenflow": "ZenFlow is not supported; remove it",
    "zero_optimization.compute_grad_norm": "the gradient norm is always logged; remove it",
    "zero_optimization.zero_quantized_nontrainable_weights": "it is not reliable in bf16; remove it",
    "zero_optimization.cpu_offload": _OFFLOAD_OPTIMIZER,
    "zero_optimization.cpu_offload_param": 'use "offload_param": {"device": "cpu"} instead',
    "zero_optimization.cpu_offload_use_pin_memory": "use pin_memory in offload_param or offload_optimizer instead",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "use stage3_gather_16bit_weights_on_model_save instead"
    ),
    "zero_optimization.mics_shard_size": _GONE,
    "zero_optimization.mics_hierarchical_params_gather": _GONE,
    "zero_optimization.zeropp_loco_param": _GONE,
    "amp": "it has been removed from DeepSpeed; set bf16 or fp16",
    **dict.fromkeys(
        words(
            "nebula compression_training quantize_training sparse_gradients eigenvalue sparse_attention "
            "elasticity graph_harvesting curriculum_learning progressive_layer_drop"
        ),
        _GONE,
    ),
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


def _nested(key: str, value: Any) -> str:
    """Format a dotted key in its nested form, as JSON-like text."""
    text = repr(value)
    for part in reversed(key.split(".")):
        text = f'{{"{part}": {text}}}'
    return text


def check_keys(config: dict[str, Any], where: str) -> None:
    """Reject keys that DeepSpeed would ignore or that would change the results.

    Raises:
        OptionError: a dotted, unknown or unsupported key; the message names its value and the closest known key.
    """
    for key, value in config.items():
        if "." in key:
            raise OptionError(f"{where}: {key}={value!r}: DeepSpeed ignores dotted keys; write {_nested(key, value)}")
        _check_key(key, key, value, TOP_LEVEL, where)
    for section, known in SECTIONS.items():
        content = value_at(config, section)
        if content is None:
            continue
        if not isinstance(content, dict):
            raise OptionError(f"{where}: {section}={content!r}: expected an object with keys such as {min(known)!r}")
        for key, value in content.items():
            _check_key(key, f"{section}.{key}", value, known, where)


def _check_key(key: str, path: str, value: Any, known: frozenset[str], where: str) -> None:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "…"
    if path in REFUSED:
        raise OptionError(f"{where}: {path}={text}: not supported: {REFUSED[path]}")
    if key not in known:
        raise OptionError(
            f"{where}: {path}={text}: DeepSpeed has no such key{did_you_mean(key, known) or '; remove it'}"
        )


def with_full_names(config: dict[str, Any], where: str) -> None:
    """Replace the short names of ZeRO-3's keys by their full names, in place."""
    zero = config.get("zero_optimization", {})
    for short, full in STAGE3_SHORT.items():
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
    from pydantic import ValidationError

    for section, model in section_models().items():
        try:
            model(**config.get(section, {}))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, (section, *first["loc"])))
            reason = " ".join(first["msg"].split())
            raise OptionError(f"{where}: {path}={first['input']!r}: {reason}; correct or remove it") from None
    for kind, names in _TOP_LEVEL_TYPES.items():
        for name in names:
            if name in config and type(config[name]) is not kind:
                wanted = type_name(kind())
                raise OptionError(f"{where}: {setting(name, config[name])}: expected {wanted}; correct or remove it")
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        if config.get(key) not in (None, "fp32", "fp16", "bf16"):
            raise OptionError(f'{where}: {key}={config[key]!r}: set "fp32", "fp16" or "bf16"')
