"""Options of transformers' ``TrainingArguments`` that this project has none for."""

# ruff: noqa: RUF009 - accepted() and only() are dataclasses.field() with a reason

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.compatibility.verdicts import accepted, only
from alignment.config.fields import Keywords, OptionalTexts, TextOrTruth
from alignment.config.process.facts import LEVELS

_ENGINE = "DeepSpeed reduces gradients itself; this has no effect on results."
_LOADER = "Affects speed only; batches are planned for the whole step and collated in order."
_SCRIPT = "Read by scripts only; the trainer does what is called."
_NO_PREDICTIONS = "Evaluation accumulates loss and metrics on the device and keeps no predictions."
_TRACKIO = "trackio is not supported"
_TRACKIO_INSTEAD = "set report_to to another integration, such as tensorboard"
_NO_METRICS = "compute_metrics is not supported"
_COMPILE = "torch.compile is not supported"
_LEAVE = "leave it out"
_LOG_LEVELS = ("passive", *LEVELS)


def _alone(options: Any) -> bool:
    return bool(options.world_size == 1)


def _plain_accelerator(options: Any) -> bool:
    """Whether the settings of Accelerate ask for what is done here: whole batches on each rank, in a seeded order."""
    harmless = ("even_batches", "use_seedable_sampler", "non_blocking", "data_seed", "use_configured_state")
    given = options.accelerator_config
    return isinstance(given, dict) and not any(value for key, value in given.items() if key not in harmless)


@dataclass(kw_only=True)
class DeviceArguments:
    """Devices, processes and the way gradients travel."""

    TITLE: ClassVar[str] = "Devices and processes"

    average_tokens_across_devices: bool = only(
        True,
        reason="means are always taken over all devices",
        instead=_LEAVE,
        when=_alone,
    )
    bf16_full_eval: bool = only(
        False,
        reason="evaluation uses the dtype of training",
        instead="set bf16",
        when=lambda options: options.resolved_bf16,
    )
    fp16_full_eval: bool = only(
        False,
        reason="evaluation uses the dtype of training",
        instead="set fp16",
        when=lambda options: options.resolved_fp16,
    )
    torch_compile: bool = only(False, reason=_COMPILE, instead=_LEAVE)
    torch_compile_backend: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    torch_compile_mode: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    torch_empty_cache_steps: int | None = accepted(
        None, "Has no effect on results; cached memory is released after each rollout."
    )
    ddp_find_unused_parameters: bool | None = accepted(None, _ENGINE)
    ddp_bucket_cap_mb: int | None = accepted(None, _ENGINE)
    ddp_broadcast_buffers: bool | None = accepted(None, _ENGINE)
    ddp_static_graph: bool | None = accepted(None, _ENGINE)
    ddp_backend: str | None = only(
        None, "nccl", "gloo", reason="ranks communicate over NCCL on GPUs and over gloo on CPUs", instead=_LEAVE
    )
    ddp_timeout: int = accepted(1800, "Use `hang_timeout`, which watches each rank.")
    fsdp: OptionalTexts = only(
        None, "", reason="the engine is DeepSpeed", instead="set deepspeed to zero3, which shards parameters likewise"
    )
    fsdp_config: Keywords = only(None, reason="the engine is DeepSpeed", instead="set deepspeed to zero3")
    accelerator_config: Keywords = only(
        None,
        {},
        reason="batches are neither split nor dispatched; every rank reads its own rows",
        instead=_LEAVE,
        when=_plain_accelerator,
    )
    parallelism_config: Any = only(
        None, reason="tensor, context and sequence parallelism are not supported", instead="set deepspeed to zero3"
    )
    debug: OptionalTexts = only(
        "", None, reason="debug modes are not supported", instead="set on_bad_step, which handles overflows"
    )
    local_rank: int = accepted(-1, "Read from the environment that the launcher sets.")


@dataclass(kw_only=True)
class LoopArguments:
    """Loss, gradients and the order of rows."""

    TITLE: ClassVar[str] = "Training"

    label_smoothing_factor: float = only(
        0.0,
        reason="it applies to the loss of transformers' Trainer only",
        instead="set label_smoothing, with CPO or DPO",
    )
    neftune_noise_alpha: float | None = only(None, reason="embedding noise (NEFTune) is not supported", instead=_LEAVE)
    optim_target_modules: OptionalTexts = only(
        None, reason="low-rank optimizers (GaLore, APOLLO) are not supported", instead="set optim: adamw_8bit"
    )
    use_cache: bool = accepted(False, "Log-probs are computed without a KV cache; generation always uses one.")
    ignore_data_skip: bool = only(False, reason="a resumed run continues with the next row", instead=_LEAVE)
    length_column_name: str = accepted("length", "Lengths are taken from the tokenised rows.")
    remove_unused_columns: bool = accepted(
        True, "Unused columns are always ignored; reward functions receive all of them."
    )
    label_names: list[str] | None = accepted(None, "Each method knows its label columns.")
    dataloader_pin_memory: bool = accepted(True, _LOADER)
    dataloader_persistent_workers: bool = accepted(False, _LOADER)
    dataloader_prefetch_factor: int | None = accepted(None, _LOADER)
    dataloader_multiprocessing_context: str | None = accepted(None, _LOADER)
    dataloader_in_order: bool = accepted(True, _LOADER)
    do_train: bool = accepted(False, _SCRIPT)
    do_eval: bool = accepted(False, _SCRIPT)
    do_predict: bool = accepted(False, _SCRIPT)


@dataclass(kw_only=True)
class ReportArguments:
    """Logs, evaluation and what is saved."""

    TITLE: ClassVar[str] = "Logging, evaluation, saving"

    log_level: str = accepted(
        "passive",
        "The value of `get_process_log_level()` on the first rank; the run itself prints on the first rank only.",
        choices=_LOG_LEVELS,
    )
    log_level_replica: str = accepted(
        "warning", "The value of `get_process_log_level()` on the other ranks.", choices=_LOG_LEVELS
    )
    log_on_each_node: bool = accepted(True, "Only the first rank logs, to `log.jsonl` and the integrations.")
    logging_nan_inf_filter: bool = accepted(
        True, "A non-finite loss is never logged; `on_bad_step` decides what happens to its step."
    )
    skip_memory_metrics: bool = accepted(True, "The report always has the peak memory.")
    project: str = accepted("huggingface", "Read by trackio only, which is not supported.")
    trackio_space_id: str | None = only(None, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    trackio_bucket_id: str | None = only(None, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    trackio_static_space_id: TextOrTruth = only(None, False, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    prediction_loss_only: bool = accepted(False, _NO_PREDICTIONS)
    eval_do_concat_batches: bool = accepted(True, _NO_PREDICTIONS)
    eval_use_gather_object: bool = accepted(False, _NO_PREDICTIONS)
    eval_accumulation_steps: int | None = accepted(None, _NO_PREDICTIONS)
    batch_eval_metrics: bool = accepted(False, "Applies to `compute_metrics` only, which is refused.")
    include_for_metrics: list[str] | None = only(None, [], reason=_NO_METRICS, instead=_LEAVE)
    save_on_each_node: bool = only(
        False, reason="a checkpoint is written once", instead="set output_dir to storage that all nodes share"
    )
    enable_jit_checkpoint: bool = accepted(False, "A termination signal always saves a checkpoint.")
    restore_callback_states_from_checkpoint: bool = accepted(False, "The states of callbacks are always restored.")


@dataclass(kw_only=True)
class FormerArguments:
    """Options of earlier releases of transformers, which scripts for TRL 0.12 to 0.24 set."""

    TITLE: ClassVar[str] = "Of earlier releases of transformers"

    logging_dir: str | None = accepted(None, "The folder of TensorBoard's log; `log.jsonl` is in `output_dir`.")
    save_safetensors: bool = only(True, reason="weights are written as safetensors only", instead=_LEAVE)
    group_by_length: bool = only(False, reason="rows are shuffled by the seed", instead="set max_tokens_per_batch")
    adafactor: bool = only(False, reason="it is an alias of an optimizer", instead="set optim: adafactor")
    jit_mode_eval: bool = only(False, reason="TorchScript is not supported", instead=_LEAVE)
    use_ipex: bool = only(False, reason="Intel's extension is no longer needed", instead=_LEAVE)
    use_mps_device: bool = only(False, reason="DeepSpeed does not run on Apple's GPUs", instead="set use_cpu")
    half_precision_backend: str = only(
        "auto", "cpu_amp", "cuda_amp", reason="Apex is not supported", instead="set fp16 or bf16"
    )
    fp16_backend: str = only("auto", "amp", "cuda_amp", reason="Apex is not supported", instead="set fp16")
    fp16_opt_level: str = accepted("O1", "Applies to Apex only, which is not supported.")
    tpu_num_cores: int | None = only(None, reason="DeepSpeed does not run on TPUs", instead="use a GPU or the CPU")
    tpu_metrics_debug: bool = only(False, reason="DeepSpeed does not run on TPUs", instead=_LEAVE)
    fsdp_min_num_params: int = only(0, reason="the engine is DeepSpeed", instead="set deepspeed to zero3")
    fsdp_transformer_layer_cls_to_wrap: str | None = only(
        None, reason="the engine is DeepSpeed", instead="set deepspeed to zero3"
    )
    torchdynamo: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    ray_scope: str | None = accepted("last", "Applies to hyperparameter search with Ray only, which is not supported.")
    past_index: int = only(-1, reason="recurrent model states are not supported", instead=_LEAVE)
    mp_parameters: str = only("", reason="SageMaker's model parallelism is not supported", instead=_LEAVE)
    split_batches: bool | None = only(None, False, reason="every rank reads its own rows", instead=_LEAVE)
    dispatch_batches: bool | None = only(None, False, reason="every rank reads its own rows", instead=_LEAVE)
    include_inputs_for_metrics: bool = only(False, reason=_NO_METRICS, instead=_LEAVE)
    push_to_hub_organization: str | None = only(
        None, reason="the organization is part of the repository's name", instead="set hub_model_id: organization/name"
    )


@dataclass(kw_only=True)
class TransformersOptions(FormerArguments, ReportArguments, LoopArguments, DeviceArguments):
    """All of them."""
