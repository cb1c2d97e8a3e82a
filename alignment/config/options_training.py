"""Options of the training loop: steps, optimizer, memory, logging, evaluation, saving and the Hub."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config.fields import Keywords, SaveStrategy, Strategy, TextOrKeywords, TextOrTruth, Texts, option


@dataclass(kw_only=True)
class TrainingOptions:
    """Steps, optimizer and schedule."""

    TITLE: ClassVar[str] = "Training"

    per_device_train_batch_size: int = option(
        8, "Micro-batch size: number of rows per device and forward pass.", older=("per_gpu_train_batch_size",)
    )
    per_device_eval_batch_size: int | None = option(
        None,
        "Micro-batch size of evaluation. Defaults to `per_device_train_batch_size`.",
        older=("per_gpu_eval_batch_size",),
    )
    gradient_accumulation_steps: int = option(1, "Number of micro-batches per optimizer step on each device.")
    learning_rate: float = option(1e-6, "Peak learning rate.")
    weight_decay: float = option(0.0, "Decoupled weight decay.")
    adam_beta1: float = option(0.9, "AdamW's decay rate of the first moment.")
    adam_beta2: float = option(0.999, "AdamW's decay rate of the second moment.")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon for numerical stability.")
    max_grad_norm: float = option(1.0, "Maximum global gradient norm, for clipping. 0: no clipping.")
    num_train_epochs: float = option(3.0, "Number of training epochs.")
    max_steps: int = option(-1, "Number of optimizer steps. If positive, overrides `num_train_epochs`.")
    lr_scheduler_type: str = option("linear", "Learning rate schedule, by its name in transformers.")
    lr_scheduler_kwargs: Keywords = option(None, "Further arguments of the schedule.")
    warmup_ratio: float = option(0.0, "Fraction of the steps over which the learning rate increases from 0.")
    warmup_steps: float = option(0, "Number of warmup steps, or a fraction of all steps if less than 1.")
    optim: str = option(
        "adamw_torch",
        "Optimizer: `adamw_torch` (fused; alias `adamw_torch_fused`); `adamw_8bit`, `paged_adamw_8bit` or "
        "`paged_adamw_32bit` (bitsandbytes, with states of 2, 2 and 8 bytes per parameter), and the same variants of "
        "`lion`, `ademamix` and `rmsprop_bnb`; `deepspeed_cpu_adam` or `deepspeed_fused_adam` (compiled at first "
        "use); `sgd`; `rmsprop`; or `adafactor` (`zero0` only).",
    )
    optim_args: TextOrKeywords = option(
        None, "Further arguments of the optimizer: `key=value,key=value` or a mapping."
    )
    seed: int = option(42, "Random seed.")
    data_seed: int | None = option(None, "Random seed of the row order. Defaults to `seed`.")
    full_determinism: bool = option(
        False,
        "Use deterministic kernels only, for bitwise reproducible runs. Slower. On a GPU, Online DPO cannot sample "
        "with `top_p` then.",
    )


@dataclass(kw_only=True)
class MemoryOptions:
    """The DeepSpeed engine, and options that trade time for memory."""

    TITLE: ClassVar[str] = "Engine and memory"

    deepspeed: TextOrKeywords = option(
        None, "DeepSpeed JSON of the policy: a path, a name in `ds_configs/` or a mapping. Defaults to `zero2`."
    )
    gradient_checkpointing: bool = option(
        True,
        "Recompute activations in the backward pass instead of storing them.",
        older=("activation_checkpointing",),
    )
    gradient_checkpointing_kwargs: Keywords = option(
        None,
        "Arguments of torch's checkpoint function, if `gradient_checkpointing` is on.",
        older=("activation_checkpointing_kwargs",),
    )
    activation_offloading: bool = option(False, "Offload activations to host memory until the backward pass.")
    auto_find_batch_size: bool = option(False, "Halve the micro-batch size after running out of memory.")


@dataclass(kw_only=True)
class LoggingOptions:
    """Logging and evaluation."""

    TITLE: ClassVar[str] = "Logging and evaluation"

    logging_strategy: Strategy = option(Strategy.STEPS, "When to log: `no`, `steps` or `epoch`.")
    logging_steps: float = option(
        10, "Number of optimizer steps between logs, or a fraction of all steps if less than 1."
    )
    logging_first_step: bool = option(False, "Also log the first step.")
    report_to: Texts = option(
        "none",
        "transformers' reporting integrations, such as `tensorboard` or `wandb`; `all` for all that are installed.",
        several=True,
    )
    run_name: str | None = option(None, "Name of the run for logging.")
    disable_tqdm: bool = option(False, "Disable progress bars.")
    include_num_input_tokens_seen: bool = option(False, "Track the number of tokens seen in the trainer's state.")
    include_tokens_per_second: bool = option(False, "Log the number of training tokens per second and device.")
    eval_strategy: Strategy = option(
        Strategy.NO, "When to evaluate: `no`, `steps` or `epoch`.", older=("evaluation_strategy",)
    )
    eval_steps: float | None = option(
        None,
        "Number of optimizer steps between evaluations, or a fraction of all steps if less than 1. Defaults to "
        "`logging_steps`.",
    )
    eval_delay: float = option(
        0, "Number of epochs or steps, depending on `eval_strategy`, before the first evaluation."
    )
    eval_on_start: bool = option(False, "Also evaluate before the first step.")


@dataclass(kw_only=True)
class SavingOptions:
    """Output folder, checkpoints and the Hub."""

    TITLE: ClassVar[str] = "Saving and the Hub"

    overwrite_output_dir: bool = option(
        False,
        "Allow an output folder that is not empty. Files of an earlier run are moved to a subfolder `previous-N`.",
    )
    save_strategy: SaveStrategy = option(
        SaveStrategy.STEPS,
        "When to save the model: `no`, `steps`, `epoch` or `best` (after every evaluation that is the best so far).",
    )
    save_steps: float = option(
        500, "Number of optimizer steps between checkpoints, or a fraction of all steps if less than 1."
    )
    save_total_limit: int | None = option(
        None, "Maximum number of checkpoints to keep; older ones are deleted, but never the newest and the best."
    )
    save_only_model: bool = option(
        False, "Save only the model in checkpoints. A run cannot be resumed from such a checkpoint."
    )
    load_best_model_at_end: bool = option(
        False,
        "Load the weights with the best evaluation at the end of training. Each new best model is saved, regardless "
        "of `save_strategy`.",
    )
    metric_for_best_model: str | None = option(
        None, "Evaluation metric that determines the best model. Defaults to `loss` if a best model is requested."
    )
    greater_is_better: bool | None = option(
        None, "Whether a greater metric is better. Defaults to true unless its name ends with `loss`."
    )
    resume_from_checkpoint: TextOrTruth = option(
        None,
        "Checkpoint folder to resume from, or `latest` (or `true`) for the latest complete checkpoint in "
        "`output_dir`. With `latest`, training starts from the beginning if there is no checkpoint.",
    )
    resume_anyway: bool = option(
        False,
        "Resume even if data, models or options differ from those of the checkpoint. The differences are listed.",
    )
    push_to_hub: bool = option(
        False, "Upload the model to the Hugging Face Hub at the end, and during training according to `hub_strategy`."
    )
    hub_model_id: str | None = option(
        None,
        "Repository to upload to: `owner/name`, or a name in your own namespace. Defaults to the name of "
        "`output_dir`.",
        older=("push_to_hub_model_id",),
    )
    hub_token: str | None = option(
        None,
        "Access token for the Hub; never logged or saved. Defaults to `HF_TOKEN` or the token of `hf auth login`.",
        older=("push_to_hub_token",),
        shown=False,
    )
    hub_private_repo: bool | None = option(
        None, "Create the repository as private if it does not exist. Defaults to the setting of its owner."
    )
    hub_strategy: str = option(
        "every_save",
        "What to upload: the model, at the `end` or at `every_save`; or, at every save, the model with the last "
        "`checkpoint` or with `all_checkpoints`.",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
    )
    hub_always_push: bool = option(False, "Upload every save, even if an earlier upload is still in progress.")
    hub_revision: str | None = option(None, "Branch to upload to; created if it does not exist. Defaults to `main`.")
