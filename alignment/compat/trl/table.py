"""The table of options of transformers' ``TrainingArguments`` and TRL's configurations since release 0.24.

An option is accepted and has no effect, or has to have certain values, each for a reason. All other options of TRL are
options of this project, with the same names. Names of earlier releases, and of other frameworks, are refused.
"""

# ruff: noqa: RUF009 - accepted() and only() are dataclasses.field() with a reason

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignment.compat.trl.verdicts import accepted, only
from alignment.config.fields import Keywords, ListOrKeywords
from alignment.config.process_facts import LogLevel

_ENGINE = "Has no effect: DeepSpeed reduces the gradients."
_LOADER = "Affects speed only: batches are planned for the whole step and collated in order."
_SCRIPT = "Read by scripts only; the trainer has separate methods for training and evaluation."
_NO_PREDICTIONS = "Has no effect: evaluation accumulates loss and metrics on the device and keeps no predictions."
_TRACKIO = "trackio is not supported; set report_to to another integration, such as tensorboard"
_EVAL_DTYPE = "evaluation uses the compute dtype of training; set"
_COMPILE = "torch.compile is not supported; remove it"
_DEVICES = "averages are always taken over all devices; remove it"
_FSDP = "FSDP is not supported; set deepspeed to zero3, which also shards parameters"
_PADDING = "Has no effect: padding is masked, whatever its width and token."
_SYNC = "Applies to `sync_ref_model` only, which is not supported."
_REGEX = "constrained decoding is not supported, as the policy's log-probs do not include it; remove it"
_LD_DPO = (
    "length desensitization (LD-DPO) weights single tokens; set loss_type: sigmoid_norm, which averages over them"
)
_DECODER = "encoder-decoder models are not supported; use a causal language model"

# Names that are not options here, and what to do.
REMOVED: dict[str, str] = {
    "tokenizer": "the model's tokenizer is used; from Python, pass processing_class to the trainer",
    "tokenizer_name_or_path": "the model's tokenizer is used; save another one in the model's folder",
    "model": "set model_name_or_path",
    "ref_model": "set ref_model_name_or_path",
    "lr": "set learning_rate",
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "set num_train_epochs"),
    **dict.fromkeys(("batch_size", "micro_batch_size", "bs"), "set per_device_train_batch_size"),
    **dict.fromkeys(("grad_accum", "accumulation_steps"), "set gradient_accumulation_steps"),
    **dict.fromkeys(("max_seq_len", "seq_len", "seq_length", "cutoff_len"), "set max_length"),
    **dict.fromkeys(("resume", "checkpoint"), "set resume_from_checkpoint, to latest or a checkpoint"),
    **dict.fromkeys(("lora", "qlora"), "set use_peft, and load_in_4bit for QLoRA"),
    **dict.fromkeys(("data", "dataset", "data_path", "train_file"), "set dataset_name"),
    "rewind_windows": "runs no longer return to a checkpoint; remove it, and set on_bad_step: skip",
}


def _plain(options: Any) -> bool:
    """Whether Accelerate's settings match the behavior here: whole batches on each rank, in a seeded order."""
    harmless = ("even_batches", "use_seedable_sampler", "non_blocking", "data_seed", "use_configured_state")
    given = options.accelerator_config
    return isinstance(given, dict) and not any(value for key, value in given.items() if key not in harmless)


@dataclass(kw_only=True)
class TransformersOptions:
    """All options of ``TrainingArguments`` that have no effect or are not supported here."""

    # Devices, processes and communication.
    average_tokens_across_devices: bool = only(True, _DEVICES, when=lambda options: options.world_size == 1)
    bf16_full_eval: bool = only(False, f"{_EVAL_DTYPE} bf16", when=lambda options: options.resolved_bf16)
    fp16_full_eval: bool = only(False, f"{_EVAL_DTYPE} fp16", when=lambda options: options.resolved_fp16)
    torch_compile: bool = only(False, _COMPILE)
    torch_compile_backend: str | None = only(None, _COMPILE)
    torch_compile_mode: str | None = only(None, _COMPILE)
    torch_empty_cache_steps: int | None = accepted(None, "Has no effect: memory is released after each rollout.")
    ddp_find_unused_parameters: bool | None = accepted(None, _ENGINE)
    ddp_bucket_cap_mb: int | None = accepted(None, _ENGINE)
    ddp_broadcast_buffers: bool | None = accepted(None, _ENGINE)
    ddp_static_graph: bool | None = accepted(None, _ENGINE)
    ddp_backend: str | None = only(None, "it is NCCL on GPUs and gloo on CPUs; remove it", "nccl", "gloo")
    ddp_timeout: int = accepted(1800, "Has no effect: `hang_timeout` ends a run in which a rank hangs.")
    fsdp: list[str] | str | None = only(None, _FSDP, "")
    fsdp_config: Keywords = only(None, _FSDP)
    accelerator_config: Keywords = only(None, "batches are neither split nor dispatched; remove it", {}, when=_plain)
    parallelism_config: Any = only(None, "only data parallelism is supported; set deepspeed to zero3")
    debug: list[str] | str | None = only("", "not supported; set on_bad_step, which handles overflows", None)
    local_rank: int = accepted(-1, "Has no effect: the local rank is read from the launcher's environment.")

    # Loss, gradients and the order of rows.
    label_smoothing_factor: float = only(0.0, "not used by any loss here; set label_smoothing with CPO or DPO")
    neftune_noise_alpha: float | None = only(None, "embedding noise (NEFTune) is not supported; remove it")
    optim_target_modules: list[str] | str | None = only(None, "GaLore is not supported; set optim: adamw_8bit")
    use_cache: bool = accepted(False, "Has no effect: generation always uses a KV cache, and log-probs never do.")
    ignore_data_skip: bool = only(False, "a resumed run always continues with the next row; remove it")
    length_column_name: str = accepted("length", "Has no effect: lengths are taken from the tokenized rows.")
    remove_unused_columns: bool = accepted(True, "Has no effect: only reward functions receive further columns.")
    label_names: list[str] | None = accepted(None, "Has no effect: each method defines its label columns.")
    dataloader_pin_memory: bool = accepted(True, _LOADER)
    dataloader_persistent_workers: bool = accepted(False, _LOADER)
    dataloader_prefetch_factor: int | None = accepted(None, _LOADER)
    dataloader_multiprocessing_context: str | None = accepted(None, _LOADER)
    dataloader_in_order: bool = accepted(True, _LOADER)
    group_by_length: bool = only(False, "the order does not depend on lengths; set max_tokens_per_batch")
    do_train: bool = accepted(False, _SCRIPT)
    do_eval: bool = accepted(False, _SCRIPT)
    do_predict: bool = accepted(False, _SCRIPT)

    # Logging, evaluation and saving.
    log_level: LogLevel = accepted("passive", "Sets `get_process_log_level()` on rank 0 only.")
    log_level_replica: LogLevel = accepted("warning", "Sets `get_process_log_level()` on the other ranks only.")
    log_on_each_node: bool = accepted(True, "Has no effect: only rank 0 logs.")
    logging_dir: str | None = accepted(None, "Sets the folder of TensorBoard logs only.")
    logging_nan_inf_filter: bool = accepted(True, "Has no effect: see `on_bad_step`.")
    skip_memory_metrics: bool = accepted(True, "Has no effect: the report always includes the peak memory.")
    project: str = accepted("huggingface", "Applies to trackio only, which is not supported.")
    trackio_space_id: str | None = only(None, _TRACKIO)
    trackio_bucket_id: str | None = only(None, _TRACKIO)
    trackio_static_space_id: Any = only(None, _TRACKIO, False)
    prediction_loss_only: bool = accepted(False, _NO_PREDICTIONS)
    eval_do_concat_batches: bool = accepted(True, _NO_PREDICTIONS)
    eval_use_gather_object: bool = accepted(False, _NO_PREDICTIONS)
    eval_accumulation_steps: int | None = accepted(None, _NO_PREDICTIONS)
    batch_eval_metrics: bool = accepted(False, "Applies to `compute_metrics` only, which is not supported.")
    include_for_metrics: list[str] | None = only(None, "compute_metrics is not supported; remove it", [])
    save_safetensors: bool = only(True, "weights are always saved as safetensors; remove it")
    save_on_each_node: bool = only(False, "a checkpoint is written once; share output_dir among nodes")
    enable_jit_checkpoint: bool = accepted(False, "Has no effect: a termination signal always saves one.")
    restore_callback_states_from_checkpoint: bool = accepted(False, "Has no effect: they are always restored.")


@dataclass(kw_only=True)
class GivenCompletions:
    """Options of all of TRL's configurations."""

    pad_to_multiple_of: int | str | None = accepted(None, _PADDING)


@dataclass(kw_only=True)
class CPOCompatibility(GivenCompletions):
    """Further options of TRL's ``CPOConfig``."""

    label_pad_token_id: int = accepted(-100, "Has no effect: labels are not padded.")
    padding_value: int | None = accepted(None, _PADDING)
    is_encoder_decoder: bool | None = only(None, _DECODER, False)
    base_model_attribute_name: str = accepted("model", "Has no effect: the head is found automatically.")


@dataclass(kw_only=True)
class KTOCompatibility(CPOCompatibility):
    """Further options of TRL's ``KTOConfig``."""

    ref_model_mixup_alpha: float = accepted(0.6, _SYNC)
    ref_model_sync_steps: int = accepted(512, _SYNC)


@dataclass(kw_only=True)
class DPOCompatibility(KTOCompatibility):
    """Further options of TRL's ``DPOConfig``."""

    pad_token: str | None = accepted(None, _PADDING)
    use_logits_to_keep: bool = accepted(False, "Has no effect: only completions have log-probs.")
    force_use_ref_model: bool = accepted(False, "Has no effect: a reference that you pass is always used.")
    ld_alpha: float | None = only(None, _LD_DPO, 1.0)
    f_divergence_type: str = only("reverse_kl", "the losses compare log-ratios (reverse KL); remove it")
    f_alpha_divergence_coef: float = accepted(0.5, "Applies to the alpha divergence only, which is not supported.")
    use_weighting: bool = only(False, "weights (WPO) need probabilities of the whole vocabulary; remove it")
    reference_free: bool = only(False, "DPO requires a reference model; set method: cpo, which does not")
    rpo_alpha: float | None = only(None, "set loss_type to [sigmoid, sft], and loss_weights to [1.0, rpo_alpha]")
    tools: ListOrKeywords = only(None, "tools are read from each row; add a tools column to the data", [])


@dataclass(kw_only=True)
class SFTCompatibility(GivenCompletions):
    """Further options of TRL's ``SFTConfig``."""

    dataset_batch_size: int | None = accepted(1000, "Affects speed only.")


@dataclass(kw_only=True)
class OnlineDPOCompatibility(GivenCompletions):
    """Further options of TRL's ``OnlineDPOConfig``."""

    vllm_guided_decoding_regex: str | None = only(None, _REGEX)
    vllm_structured_outputs_regex: str | None = only(None, _REGEX)
    vllm_group_port: int = accepted(
        51216, "Has no effect: weights are sent to vLLM in a folder (`vllm_weights_folder`)."
    )
    cache_implementation: list[str] | str | None = only(None, "set rollout_backend instead", "dynamic")
