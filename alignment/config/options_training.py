"""The options of the loop: steps, optimizer, memory, logging, evaluation, saving and the hub."""

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
        8, "Rows of one micro-batch on each device.", older=("per_gpu_train_batch_size",)
    )
    per_device_eval_batch_size: int | None = option(
        None, "The same in evaluation; unset: as in training.", older=("per_gpu_eval_batch_size",)
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches that make one optimizer step.")
    learning_rate: float = option(1e-6, "Peak learning rate.")
    weight_decay: float = option(0.0, "Decoupled weight decay.")
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment.")
    adam_beta2: float = option(0.999, "AdamW's decay of the second moment.")
    adam_epsilon: float = option(1e-8, "AdamW's term against division by zero.")
    max_grad_norm: float = option(1.0, "Clip the global gradient norm to this; 0: no clipping.")
    num_train_epochs: float = option(3.0, "Passes over the data.")
    max_steps: int = option(-1, "Optimizer steps; takes the place of `num_train_epochs` when positive.")
    lr_scheduler_type: str = option("linear", "Schedule of the learning rate, by transformers' names.")
    lr_scheduler_kwargs: Keywords = option(None, "Further arguments of the schedule.")
    warmup_ratio: float = option(0.0, "Share of the steps over which the learning rate rises from 0.")
    warmup_steps: float = option(0, "The same as a number of steps; below 1: as a share of them, too.")
    optim: str = option(
        "adamw_torch",
        "Optimizer: `adamw_torch` (fused; also `adamw_torch_fused`), `adamw_8bit`, `paged_adamw_8bit`, "
        "`paged_adamw_32bit` (bitsandbytes; states of 2, 2 and 8 bytes per parameter; the same of `lion`, `ademamix` "
        "and `rmsprop_bnb`), `deepspeed_cpu_adam`, `deepspeed_fused_adam` (compiled at first use), `sgd`, "
        "`rmsprop` or `adafactor` (`zero0` only).",
    )
    optim_args: TextOrKeywords = option(
        None, "Further arguments of the optimizer: `key=value,key=value` or a mapping."
    )
    seed: int = option(42, "Seed of everything random.")
    data_seed: int | None = option(None, "Seed of the order of the rows; unset: `seed`.")
    full_determinism: bool = option(False, "Deterministic kernels only: slower, and repeats to the bit.")


@dataclass(kw_only=True)
class MemoryOptions:
    """What trades time against memory."""

    TITLE: ClassVar[str] = "Engine and memory"

    deepspeed: TextOrKeywords = option(
        None, "DeepSpeed JSON of the policy: path, name in `ds_configs/` or mapping; unset: `zero2`."
    )
    gradient_checkpointing: bool = option(
        True, "Recompute activations in backward instead of keeping them.", older=("activation_checkpointing",)
    )
    gradient_checkpointing_kwargs: Keywords = option(
        None,
        "Arguments of torch's checkpoint function, where `gradient_checkpointing` is on.",
        older=("activation_checkpointing_kwargs",),
    )
    activation_offloading: bool = option(False, "Keep activations in host memory until backward.")
    auto_find_batch_size: bool = option(False, "Halve the micro-batch after running out of memory.")


@dataclass(kw_only=True)
class LoggingOptions:
    """Logs and evaluation."""

    TITLE: ClassVar[str] = "Logging and evaluation"

    logging_strategy: Strategy = option(Strategy.STEPS, "When to log: `no`, `steps` or `epoch`.")
    logging_steps: float = option(
        10, "Optimizer steps between two lines of the log; below 1: as a share of the run's steps."
    )
    logging_first_step: bool = option(False, "Log the first step as well.")
    report_to: Texts = option(
        "none",
        "transformers' reporting integrations: `tensorboard`, `wandb` …, several, or `all` that are installed.",
        several=True,
    )
    run_name: str | None = option(None, "Name of the run in the log.")
    disable_tqdm: bool = option(False, "No progress bar.")
    include_num_input_tokens_seen: bool = option(False, "Keep the number of tokens seen in the trainer's state.")
    include_tokens_per_second: bool = option(False, "Log the tokens trained on per second and device.")
    eval_strategy: Strategy = option(
        Strategy.NO, "When to evaluate: `no`, `steps` or `epoch`.", older=("evaluation_strategy",)
    )
    eval_steps: float | None = option(
        None, "Optimizer steps between evaluations; below 1: as a share of the run's steps; unset: `logging_steps`."
    )
    eval_delay: float = option(0, "Evaluate for the first time after so many epochs, or steps (`eval_strategy`).")
    eval_on_start: bool = option(False, "Evaluate once before the first step.")


@dataclass(kw_only=True)
class SavingOptions:
    """Folders, checkpoints and the hub."""

    TITLE: ClassVar[str] = "Saving and the hub"

    overwrite_output_dir: bool = option(
        False,
        "Write into an output folder that is not empty; checkpoints and logs in it are moved to `previous-1` ….",
    )
    save_strategy: SaveStrategy = option(
        SaveStrategy.STEPS,
        "When to save the model: `no`, `steps`, `epoch`, or `best`: whenever an evaluation is the best so far.",
    )
    save_steps: float = option(500, "Optimizer steps between saves; below 1: as a share of the run's steps.")
    save_total_limit: int | None = option(None, "Keep only the newest so many checkpoint folders.")
    save_only_model: bool = option(False, "Save the model without the state that a resume needs.")
    load_best_model_at_end: bool = option(
        False, "End with the weights that evaluated best; each new best is saved, whatever `save_strategy` says."
    )
    metric_for_best_model: str | None = option(
        None, "Metric of the evaluation that decides which is best; unset: `loss` where a best one is asked for."
    )
    greater_is_better: bool | None = option(
        None, "Whether a greater metric is better; unset: unless its name ends with `loss`."
    )
    resume_from_checkpoint: TextOrTruth = option(
        None,
        "Checkpoint folder to resume from; `latest` (or `true`): the newest whole one in `output_dir`, or a fresh "
        "start if there is none.",
    )
    resume_anyway: bool = option(False, "Resume although data, models or options differ; the differences are listed.")
    push_to_hub: bool = option(
        False, "Upload the model to the Hugging Face hub, at the end and as `hub_strategy` says."
    )
    hub_model_id: str | None = option(
        None,
        "Repository to upload to, `owner/name` or a name of your own; unset: the name of the output folder.",
        older=("push_to_hub_model_id",),
    )
    hub_token: str | None = option(
        None,
        "Token for the hub, never logged or saved; unset: that of `hf auth login`.",
        older=("push_to_hub_token",),
        shown=False,
    )
    hub_private_repo: bool | None = option(
        None, "Make the repository private where it is not there yet; unset: as its owner's default is."
    )
    hub_strategy: str = option(
        "every_save",
        "What is uploaded: the model at the `end`, at `every_save`, with the state of the last `checkpoint`, or with "
        "`all_checkpoints`.",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
    )
    hub_always_push: bool = option(False, "Upload every save, also while an earlier upload is under way.")
    hub_revision: str | None = option(None, "Branch to upload to, made where it is not there yet; unset: `main`.")
