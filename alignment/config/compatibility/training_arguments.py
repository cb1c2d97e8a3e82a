"""Options of transformers' ``TrainingArguments`` that have no effect or are not supported here."""

# ruff: noqa: RUF009 - accepted() and only() are dataclasses.field() with a reason

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.compatibility.verdicts import accepted, only
from alignment.config.fields import Keywords
from alignment.config.process_facts import LogLevel

_ENGINE = "Has no effect: DeepSpeed reduces the gradients."
_LOADER = "Affects speed only: batches are planned for the whole step and collated in order."
_SCRIPT = "Read by scripts only; the trainer has separate methods for training and evaluation."
_NO_PREDICTIONS = "Has no effect: evaluation accumulates loss and metrics on the device and keeps no predictions."
_TRACKIO = "trackio is not supported"
_TRACKIO_INSTEAD = "set report_to to another integration, such as tensorboard"
_NO_METRICS = "compute_metrics is not supported"
_COMPILE = "torch.compile is not supported"
_LEAVE = "remove it"


def _alone(options: Any) -> bool:
    return bool(options.world_size == 1)


def _plain_accelerator(options: Any) -> bool:
    """Whether Accelerate's settings match the behavior here: whole batches on each rank, in a seeded order."""
    harmless = ("even_batches", "use_seedable_sampler", "non_blocking", "data_seed", "use_configured_state")
    given = options.accelerator_config
    return isinstance(given, dict) and not any(value for key, value in given.items() if key not in harmless)


@dataclass(kw_only=True)
class DeviceArguments:
    """Devices, processes and communication."""

    TITLE: ClassVar[str] = "Devices and processes"

    average_tokens_across_devices: bool = only(
        True,
        reason="averages are always taken over all devices",
        instead=_LEAVE,
        when=_alone,
    )
    bf16_full_eval: bool = only(
        False,
        reason="evaluation uses the compute dtype of training",
        instead="set bf16",
        when=lambda options: options.resolved_bf16,
    )
    fp16_full_eval: bool = only(
        False,
        reason="evaluation uses the compute dtype of training",
        instead="set fp16",
        when=lambda options: options.resolved_fp16,
    )
    torch_compile: bool = only(False, reason=_COMPILE, instead=_LEAVE)
    torch_compile_backend: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    torch_compile_mode: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    torch_empty_cache_steps: int | None = accepted(
        None, "Has no effect: cached memory is released after each rollout."
    )
    ddp_find_unused_parameters: bool | None = accepted(None, _ENGINE)
    ddp_bucket_cap_mb: int | None = accepted(None, _ENGINE)
    ddp_broadcast_buffers: bool | None = accepted(None, _ENGINE)
    ddp_static_graph: bool | None = accepted(None, _ENGINE)
    ddp_backend: str | None = only(
        None, "nccl", "gloo", reason="ranks communicate over NCCL on GPUs and over gloo on CPUs", instead=_LEAVE
    )
    ddp_timeout: int = accepted(1800, "Has no effect: `hang_timeout` ends a run in which a rank hangs.")
    fsdp: list[str] | str | None = only(
        None, "", reason="FSDP is not supported", instead="set deepspeed to zero3, which also shards parameters"
    )
    fsdp_config: Keywords = only(None, reason="FSDP is not supported", instead="set deepspeed to zero3")
    accelerator_config: Keywords = only(
        None,
        {},
        reason="batches are neither split nor dispatched: every rank reads its own rows",
        instead=_LEAVE,
        when=_plain_accelerator,
    )
    parallelism_config: Any = only(
        None, reason="tensor, context and sequence parallelism are not supported", instead="set deepspeed to zero3"
    )
    debug: list[str] | str | None = only(
        "", None, reason="debug modes are not supported", instead="set on_bad_step, which handles overflows"
    )
    local_rank: int = accepted(-1, "Has no effect: the local rank is read from the launcher's environment.")


@dataclass(kw_only=True)
class LoopArguments:
    """Loss, gradients and the order of rows."""

    TITLE: ClassVar[str] = "Training"

    label_smoothing_factor: float = only(
        0.0,
        reason="it applies to the loss of transformers' Trainer only",
        instead="set label_smoothing with CPO or DPO",
    )
    neftune_noise_alpha: float | None = only(None, reason="embedding noise (NEFTune) is not supported", instead=_LEAVE)
    optim_target_modules: list[str] | str | None = only(
        None, reason="low-rank optimizers (GaLore, APOLLO) are not supported", instead="set optim: adamw_8bit"
    )
    use_cache: bool = accepted(
        False, "Has no effect: log-probs are computed without a KV cache, and generation always uses one."
    )
    ignore_data_skip: bool = only(False, reason="a resumed run always continues with the next row", instead=_LEAVE)
    length_column_name: str = accepted("length", "Has no effect: lengths are taken from the tokenized rows.")
    remove_unused_columns: bool = accepted(
        True, "Has no effect: unused columns are always ignored, and reward functions receive all columns."
    )
    label_names: list[str] | None = accepted(None, "Has no effect: each method defines its label columns.")
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
    """Logging, evaluation and saving."""

    TITLE: ClassVar[str] = "Logging, evaluation, saving"

    log_level: LogLevel = accepted(
        "passive", "Sets `get_process_log_level()` on rank 0 only; the run itself always prints on rank 0 only."
    )
    log_level_replica: LogLevel = accepted("warning", "Sets `get_process_log_level()` on the other ranks only.")
    log_on_each_node: bool = accepted(
        True, "Has no effect: only rank 0 logs, to `log.jsonl` and the reporting integrations."
    )
    logging_nan_inf_filter: bool = accepted(
        True, "Has no effect: a non-finite loss is never logged, and `on_bad_step` decides how its step is handled."
    )
    skip_memory_metrics: bool = accepted(True, "Has no effect: the report always includes the peak memory.")
    project: str = accepted("huggingface", "Applies to trackio only, which is not supported.")
    trackio_space_id: str | None = only(None, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    trackio_bucket_id: str | None = only(None, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    trackio_static_space_id: Any = only(None, False, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    prediction_loss_only: bool = accepted(False, _NO_PREDICTIONS)
    eval_do_concat_batches: bool = accepted(True, _NO_PREDICTIONS)
    eval_use_gather_object: bool = accepted(False, _NO_PREDICTIONS)
    eval_accumulation_steps: int | None = accepted(None, _NO_PREDICTIONS)
    batch_eval_metrics: bool = accepted(False, "Applies to `compute_metrics` only, which is not supported.")
    include_for_metrics: list[str] | None = only(None, [], reason=_NO_METRICS, instead=_LEAVE)
    save_on_each_node: bool = only(
        False, reason="a checkpoint is written once", instead="set output_dir to a folder that all nodes share"
    )
    enable_jit_checkpoint: bool = accepted(False, "Has no effect: a termination signal always saves a checkpoint.")
    restore_callback_states_from_checkpoint: bool = accepted(
        False, "Has no effect: the states of callbacks are always restored."
    )


@dataclass(kw_only=True)
class FormerArguments:
    """Options of earlier releases of transformers, which scripts for TRL 0.12 to 0.24 set."""

    TITLE: ClassVar[str] = "Options of earlier releases of transformers"

    logging_dir: str | None = accepted(None, "Sets the folder of TensorBoard logs; `log.jsonl` is in `output_dir`.")
    save_safetensors: bool = only(True, reason="weights are always saved as safetensors", instead=_LEAVE)
    group_by_length: bool = only(
        False, reason="the order of the rows does not depend on their lengths", instead="set max_tokens_per_batch"
    )
    adafactor: bool = only(False, reason="it is an alias for an optimizer", instead="set optim: adafactor")
    jit_mode_eval: bool = only(False, reason="TorchScript is not supported", instead=_LEAVE)
    use_ipex: bool = only(False, reason="Intel's extension is not supported", instead=_LEAVE)
    use_mps_device: bool = only(False, reason="Apple GPUs are not supported", instead="set use_cpu")
    half_precision_backend: str = only(
        "auto", "cpu_amp", "cuda_amp", reason="Apex is not supported", instead="set fp16 or bf16"
    )
    fp16_backend: str = only("auto", "amp", "cuda_amp", reason="Apex is not supported", instead="set fp16")
    fp16_opt_level: str = accepted("O1", "Applies to Apex only, which is not supported.")
    tpu_num_cores: int | None = only(None, reason="TPUs are not supported", instead="use a GPU or the CPU")
    tpu_metrics_debug: bool = only(False, reason="TPUs are not supported", instead=_LEAVE)
    fsdp_min_num_params: int = only(0, reason="FSDP is not supported", instead="set deepspeed to zero3")
    fsdp_transformer_layer_cls_to_wrap: str | None = only(
        None, reason="FSDP is not supported", instead="set deepspeed to zero3"
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
    """All options of ``TrainingArguments`` that have no effect or are not supported here."""
