"""Options of the training loop: steps, optimizer, memory, logging, evaluation, saving, the Hub, and faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator

from alignment.config.fields import (
    AUTO,
    AUTO_BY_DEFAULT,
    Choice,
    Count,
    Early,
    Free,
    Keywords,
    Late,
    Natural,
    NotNegative,
    OrAuto,
    Positive,
    Share,
    Steps,
    Strategy,
    WarmupSteps,
    option,
)

# transformers' SchedulerType without the schedules that depend on a metric.
Schedule: TypeAlias = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip
# Of transformers' OptimizerNames, those of torch and bitsandbytes, and DeepSpeed's own two. Not Adagrad: torch creates
# its states in the constructor, which ZeRO calls again with the sharded weights in a single group.
Optimizer: TypeAlias = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
    "deepspeed_cpu_adam", "deepspeed_fused_adam", "sgd", "rmsprop", "adafactor", "lion_8bit", "lion_32bit",
    "paged_lion_8bit", "paged_lion_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit",
    "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
]  # fmt: skip


def _latest(value: Any) -> Any:
    """Return the checkpoint that a truth value asks for; false overrides that of a recipe."""
    return {"true": "latest", "false": ""}.get(str(value).strip().lower(), value)


@dataclass(kw_only=True)
class TrainingOptions:
    """Training."""

    per_device_train_batch_size: Free[Count] = option(
        8, "Micro-batch size: number of rows per device and forward pass.", older=("per_gpu_train_batch_size",)
    )
    per_device_eval_batch_size: Late[Free[Count | None]] = option(
        None, "Micro-batch size of evaluation, by default that of training.", older=("per_gpu_eval_batch_size",)
    )
    gradient_accumulation_steps: Free[Count] = option(1, "Number of micro-batches per optimizer step on each device.")
    learning_rate: Early[NotNegative] = option(1e-6, "Peak learning rate.")
    weight_decay: Early[NotNegative] = option(0.0, "Decoupled weight decay.")
    adam_beta1: Early[Share] = option(0.9, "AdamW's decay rate of the first moment.")
    adam_beta2: Early[Share] = option(0.999, "AdamW's decay rate of the second moment.")
    adam_epsilon: Early[Positive] = option(1e-8, "AdamW's epsilon for numerical stability.")
    max_grad_norm: NotNegative = option(1.0, "Maximum global gradient norm, for clipping. 0: no clipping.")
    num_train_epochs: Late[Free[Positive]] = option(3.0, "Number of training epochs.")
    max_steps: Late[Free[int]] = option(-1, "Number of optimizer steps. If positive, overrides `num_train_epochs`.")
    lr_scheduler_type: Early[Schedule] = option("linear", "Learning rate schedule, by its name in transformers.")
    lr_scheduler_kwargs: Early[Keywords] = option(None, "Further arguments of the schedule.")
    warmup_ratio: Early[Share] = option(0.0, "Fraction of the steps over which the learning rate increases from 0.")
    warmup_steps: Early[WarmupSteps] = option(0, "Number of warmup steps, or a fraction of all steps if less than 1.")
    optim: Optimizer = option(
        "adamw_torch",
        "Optimizer: `adamw_torch` (fused), `adamw_8bit` and others of bitsandbytes, `deepspeed_cpu_adam`, "
        "`deepspeed_fused_adam` (compiled at first use), `sgd`, `rmsprop` or `adafactor` (`zero0` only).",
    )
    optim_args: dict[str, Any] | str | None = option(None, "Optimizer arguments: `key=value,key=value` or a mapping.")
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = option(42, "Random seed.")
    data_seed: Natural | None = option(None, "Random seed of the row order. Defaults to `seed`.")
    full_determinism: Early[bool] = option(False, "Use deterministic kernels only, which are slower.")


@dataclass(kw_only=True)
class MemoryOptions:
    """Engine and memory."""

    deepspeed: Free[dict[str, Any] | str | None] = option(
        None, "DeepSpeed JSON of the policy: a path, a name in `ds_configs/` or a mapping. Defaults to `zero2`."
    )
    gradient_checkpointing: Annotated[Free[bool], OrAuto] = option(
        AUTO_BY_DEFAULT,
        "Recompute activations in the backward pass to save memory: in all layers (`true`), in none, or in as few as "
        "fit (`auto`; all, if the memory cannot be planned).",
        older=("activation_checkpointing",),
    )
    gradient_checkpointing_kwargs: Free[Keywords] = option(
        None, "Arguments of torch's checkpoint function.", older=("activation_checkpointing_kwargs",)
    )
    activation_offloading: Free[bool] = option(
        False,
        "Keep the hidden states that gradient checkpointing saves in host memory until the backward pass. All layers "
        "are recomputed.",
    )
    tiled_mlp: Annotated[Free[bool], OrAuto] = option(
        AUTO_BY_DEFAULT,
        "Compute the MLP of each layer in slices of the sequence: `true`, `false`, or `auto`, if a GPU's memory "
        "requires it.",
    )
    memory_rehearsal: Late[Free[Choice]] = option(
        AUTO,
        "Compute the largest micro-batch, evaluation batch and rollout before the first step, so that a run that does "
        "not fit in memory ends there: `true`, `false`, or `auto`, on GPUs.",
    )
    auto_find_batch_size: Early[Free[bool]] = option(
        False, "Split windows into smaller micro-batches until the rehearsal fits in memory. The update is the same."
    )


@dataclass(kw_only=True)
class LoggingOptions:
    """Logging and evaluation."""

    logging_strategy: Late[Free[Strategy]] = option("steps", "When to log: `no`, `steps` or `epoch`.")
    logging_steps: Late[Free[Steps]] = option(10, "Steps between logs, or a fraction of all steps if less than 1.")
    logging_first_step: Late[Free[bool]] = option(False, "Also log the first step.")
    report_to: Free[str | list[str]] = option("none", "Integrations such as `wandb`; `all` for those installed.")
    run_name: Late[Free[str | None]] = option(None, "Name of the run for logging.")
    disable_tqdm: Late[Free[bool]] = option(
        False, "Print one line per logging step instead of progress bars, as always if stderr is not a terminal."
    )
    include_num_input_tokens_seen: Late[Free[bool]] = option(False, "Track the number of tokens seen.")
    include_tokens_per_second: Late[Free[bool]] = option(False, "Log the training tokens per second and device.")
    eval_strategy: Late[Free[Strategy]] = option(
        "no", "When to evaluate: `no`, `steps` or `epoch`.", older=("evaluation_strategy",)
    )
    eval_steps: Late[Free[Steps | None]] = option(None, "Steps between evaluations. Defaults to `logging_steps`.")
    eval_delay: Late[Free[NotNegative]] = option(0, "Steps or epochs (`eval_strategy`) before the first evaluation.")
    eval_on_start: Late[Free[bool]] = option(False, "Also evaluate before the first step.")


@dataclass(kw_only=True)
class SavingOptions:
    """Saving and the Hub."""

    overwrite_output_dir: Free[bool] = option(False, "Allow an output folder with files, which move to `previous-N`.")
    save_strategy: Late[Free[Literal["no", "steps", "epoch", "best"]]] = option(
        "steps", "When to save the model: `no`, `steps`, `epoch` or `best` (after the best evaluation so far)."
    )
    save_steps: Late[Free[Steps]] = option(500, "Steps between checkpoints, or a fraction of all if less than 1.")
    save_total_limit: Late[Free[Count | None]] = option(None, "Checkpoints to keep, the newest and the best included.")
    save_only_model: Late[Free[bool]] = option(False, "Save only the model, from which a run cannot be resumed.")
    load_best_model_at_end: Late[Free[bool]] = option(False, "Load the weights with the best evaluation at the end.")
    metric_for_best_model: Late[str | None] = option(None, "Metric that determines the best model. Default: `loss`.")
    greater_is_better: Late[bool | None] = option(None, "Whether greater is better, by default unless it is a loss.")
    early_stopping_patience: Free[Count | None] = option(
        None, "Stop training once `metric_for_best_model` has not improved in this number of evaluations in a row."
    )
    early_stopping_threshold: Free[NotNegative] = option(0.0, "Minimum improvement that counts for early stopping.")
    resume_from_checkpoint: Late[Free[Annotated[str | None, BeforeValidator(_latest)]]] = option(
        None, "Checkpoint folder to resume from, or `latest` (or `true`) for the latest in `output_dir`, if any."
    )
    resume_anyway: Late[Free[bool]] = option(False, "Resume even if data, models or options differ; they are listed.")
    push_to_hub: Free[bool] = option(False, "Upload the model to the Hugging Face Hub; see `hub_strategy`.")
    hub_model_id: Free[str | None] = option(
        None, "Repository to upload to, by default named as `output_dir`.", older=("push_to_hub_model_id",)
    )
    hub_token: Free[str | None] = option(
        None, "Access token for the Hub; never logged or saved.", older=("push_to_hub_token",), shown=False
    )
    hub_private_repo: Free[bool | None] = option(None, "Whether a new repository is private. Defaults to its owner's.")
    hub_strategy: Free[Literal["end", "every_save", "checkpoint", "all_checkpoints"]] = option(
        "every_save", "What to upload: the model, at the `end` or `every_save`, or with the last or all checkpoints."
    )
    hub_always_push: Free[bool] = option(False, "Upload every save, even if an earlier upload is still in progress.")
    hub_revision: Free[str | None] = option(None, "Branch to upload to, created if missing. Defaults to `main`.")


@dataclass(kw_only=True)
class FaultOptions:
    """Faults and hangs."""

    on_bad_step: Late[Free[Literal["stop", "skip"]]] = option(
        "stop", "If loss or gradient is not finite, or the loss spikes: `stop`, with the last good weights, or `skip`."
    )
    loss_spike_factor: Late[Free[Annotated[float, Gt(1)] | None]] = option(
        None, "Treat a step as bad if its loss exceeds this multiple of the running median. Unset: never."
    )
    max_bad_steps: Late[Free[Count]] = option(10, "Maximum number of bad steps to skip; one more ends the run.")
    retries: Free[Natural] = option(3, "Number of retries of a failing read of data, reward call or judge.")
    retry_pause: Free[NotNegative] = option(5.0, "Seconds before the first retry; doubles every time, up to 300.")
    hang_timeout: Late[Free[Positive]] = option(600.0, "Seconds without progress after which a rank counts as hung.")
    hang_timeout_first: Late[Free[Positive]] = option(
        3600.0, "`hang_timeout` for the first time that each phase runs."
    )
    hang_factor: Late[Free[Positive]] = option(5.0, "Extend limits to this multiple of the longest time of a phase.")
    # At least 5: heartbeats come twice a second, unless the GIL or the network delays them.
    peer_timeout: Free[Annotated[float, Ge(5)]] = option(
        25.0, "Seconds without a heartbeat from a rank to end the run."
    )
