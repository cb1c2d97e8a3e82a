"""Options of transformers' ``TrainingArguments`` that this project has none for."""

# ruff: noqa: RUF009 - accepted() and only() are dataclasses.field() with a reason

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.compatibility.verdicts import accepted, only
from alignment.config.fields import Keywords, OptionalTexts, TextOrTruth, words

_ENGINE = "The engine is DeepSpeed, which sums gradients itself; no result depends on it."
_LOADER = "It is a matter of speed alone: batches are planned for the whole step and collated in order."
_SCRIPT = "Scripts read it for themselves; what is called is done."
_NO_PREDICTIONS = "Evaluation adds up loss and metrics on the device and keeps no predictions."
_TRACKIO = "trackio is not among the integrations"
_TRACKIO_INSTEAD = "set report_to to one of the others, such as tensorboard"
_NO_METRICS = "compute_metrics is not supported, so nothing could be included for it"
_COMPILE = "torch.compile is not supported"
_LEAVE = "leave it out"
_LOG_LEVELS = words("passive detail debug info warning error critical")


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
        reason="a mean is a sum over all devices divided by a count over all devices",
        instead=_LEAVE,
        when=_alone,
    )
    bf16_full_eval: bool = only(
        False,
        reason="evaluation computes as training does",
        instead="set bf16",
        when=lambda options: options.resolved_bf16,
    )
    fp16_full_eval: bool = only(
        False,
        reason="evaluation computes as training does",
        instead="set fp16",
        when=lambda options: options.resolved_fp16,
    )
    torch_compile: bool = only(False, reason=_COMPILE, instead=_LEAVE)
    torch_compile_backend: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    torch_compile_mode: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    torch_empty_cache_steps: int | None = accepted(
        None, "No result depends on it; memory that generation held is given back after each rollout."
    )
    ddp_find_unused_parameters: bool | None = accepted(None, _ENGINE)
    ddp_bucket_cap_mb: int | None = accepted(None, _ENGINE)
    ddp_broadcast_buffers: bool | None = accepted(None, _ENGINE)
    ddp_static_graph: bool | None = accepted(None, _ENGINE)
    ddp_backend: str | None = only(
        None, "nccl", "gloo", reason="ranks talk by NCCL on GPUs and by gloo on CPUs", instead=_LEAVE
    )
    ddp_timeout: int = accepted(1800, "How long a phase may take is said by `hang_timeout`, which watches each rank.")
    fsdp: OptionalTexts = only(
        None, "", reason="the engine is DeepSpeed", instead="set deepspeed to zero3, which shards parameters likewise"
    )
    fsdp_config: Keywords = only(None, reason="the engine is DeepSpeed", instead="set deepspeed to zero3")
    accelerator_config: Keywords = only(
        None,
        {},
        reason="batches are neither split nor dispatched: every rank reads its own rows of each step",
        instead=_LEAVE,
        when=_plain_accelerator,
    )
    parallelism_config: Any = only(
        None, reason="there are no tensor, context or sequence parallel ranks", instead="set deepspeed to zero3"
    )
    debug: OptionalTexts = only(
        "", None, reason="there is no debugger of overflows", instead="set on_bad_step, which says what to do at one"
    )
    local_rank: int = accepted(-1, "The launcher says it in the environment; what scripts read here is that.")


@dataclass(kw_only=True)
class LoopArguments:
    """Loss, gradients and the order of rows."""

    TITLE: ClassVar[str] = "Training"

    label_smoothing_factor: float = only(
        0.0, reason="it is of the Trainer's own loss", instead="set label_smoothing, which CPO and DPO have"
    )
    neftune_noise_alpha: float | None = only(None, reason="noise on embeddings is not supported", instead=_LEAVE)
    optim_target_modules: OptionalTexts = only(
        None, reason="optimizers of low rank (GaLore, APOLLO) are not supported", instead="set optim: adamw_8bit"
    )
    use_cache: bool = accepted(False, "Log-probs are computed without a cache; a rollout has one of its own.")
    ignore_data_skip: bool = only(
        False, reason="a resumed run goes on with the rows that come next", instead="leave it out"
    )
    length_column_name: str = accepted("length", "Lengths are those of the tokenised rows; no column is asked.")
    remove_unused_columns: bool = accepted(
        True, "Columns that a method does not need are left aside in any case; reward functions receive them all."
    )
    label_names: list[str] | None = accepted(None, "Which columns are labels is known by the method.")
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
        "What `get_process_log_level()` returns; the run's own lines are those of the first rank.",
        choices=_LOG_LEVELS,
    )
    log_level_replica: str = accepted("warning", "The same for ranks but the first.", choices=_LOG_LEVELS)
    log_on_each_node: bool = accepted(True, "The first rank logs, into `log.jsonl` and the integrations.")
    logging_nan_inf_filter: bool = accepted(
        True, "A loss that is not finite never reaches the log: `on_bad_step` says what becomes of its step."
    )
    skip_memory_metrics: bool = accepted(True, "The report has the peaks of memory in any case.")
    project: str = accepted("huggingface", "Read by trackio alone, which is not among the integrations.")
    trackio_space_id: str | None = only(None, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    trackio_bucket_id: str | None = only(None, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    trackio_static_space_id: TextOrTruth = only(None, False, reason=_TRACKIO, instead=_TRACKIO_INSTEAD)
    prediction_loss_only: bool = accepted(False, _NO_PREDICTIONS)
    eval_do_concat_batches: bool = accepted(True, _NO_PREDICTIONS)
    eval_use_gather_object: bool = accepted(False, _NO_PREDICTIONS)
    eval_accumulation_steps: int | None = accepted(None, _NO_PREDICTIONS)
    batch_eval_metrics: bool = accepted(False, "It is about compute_metrics, which is refused where it is given.")
    include_for_metrics: list[str] | None = only(None, [], reason=_NO_METRICS, instead=_LEAVE)
    save_on_each_node: bool = only(
        False, reason="a checkpoint is written once", instead="let output_dir be on storage that all nodes see"
    )
    enable_jit_checkpoint: bool = accepted(False, "A signal to end saves the run's state in any case.")
    restore_callback_states_from_checkpoint: bool = accepted(
        False, "The states of callbacks are restored in any case, as everything that a run would go on from."
    )


@dataclass(kw_only=True)
class FormerArguments:
    """What earlier releases of transformers had; scripts for TRL 0.12 to 0.24 set them."""

    TITLE: ClassVar[str] = "Of earlier releases of transformers"

    logging_dir: str | None = accepted(None, "Where tensorboard's log goes; this project's own lies in `output_dir`.")
    save_safetensors: bool = only(True, reason="weights are written as safetensors alone", instead=_LEAVE)
    group_by_length: bool = only(
        False, reason="the order of the rows is that of the seed", instead="set max_tokens_per_batch"
    )
    adafactor: bool = only(False, reason="it is another name of an optimizer", instead="set optim")
    jit_mode_eval: bool = only(False, reason="TorchScript is not supported", instead=_LEAVE)
    use_ipex: bool = only(False, reason="Intel's extension is no longer needed", instead=_LEAVE)
    use_mps_device: bool = only(False, reason="DeepSpeed does not run on Apple's GPUs", instead="set use_cpu")
    half_precision_backend: str = only(
        "auto", "cpu_amp", "cuda_amp", reason="Apex is not supported", instead="set fp16 or bf16"
    )
    fp16_backend: str = only("auto", "amp", "cuda_amp", reason="Apex is not supported", instead="set fp16")
    fp16_opt_level: str = accepted("O1", "It is Apex's, which is not used.")
    tpu_num_cores: int | None = only(None, reason="DeepSpeed does not run on TPUs", instead="use a GPU or the CPU")
    tpu_metrics_debug: bool = only(False, reason="DeepSpeed does not run on TPUs", instead=_LEAVE)
    fsdp_min_num_params: int = only(0, reason="the engine is DeepSpeed", instead="set deepspeed to zero3")
    fsdp_transformer_layer_cls_to_wrap: str | None = only(
        None, reason="the engine is DeepSpeed", instead="set deepspeed to zero3"
    )
    torchdynamo: str | None = only(None, reason=_COMPILE, instead=_LEAVE)
    ray_scope: str | None = accepted("last", "It is of a search for hyperparameters by Ray, which is not here.")
    past_index: int = only(-1, reason="no outputs of the model are kept", instead=_LEAVE)
    mp_parameters: str = only("", reason="SageMaker's model parallelism is not supported", instead=_LEAVE)
    split_batches: bool | None = only(None, False, reason="every rank reads rows of its own", instead=_LEAVE)
    dispatch_batches: bool | None = only(None, False, reason="every rank reads rows of its own", instead=_LEAVE)
    include_inputs_for_metrics: bool = only(False, reason=_NO_METRICS, instead=_LEAVE)
    push_to_hub_organization: str | None = only(
        None, reason="it is a part of the repository's name", instead="set hub_model_id: organisation/name"
    )


@dataclass(kw_only=True)
class TransformersOptions(FormerArguments, ReportArguments, LoopArguments, DeviceArguments):
    """All of them."""
