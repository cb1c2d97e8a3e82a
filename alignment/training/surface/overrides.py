"""Refuse subclasses that override methods of transformers' and TRL's trainers that are never called here.

The method's class, options and callbacks take their place; each entry names which.
"""

from __future__ import annotations

from collections.abc import Iterator

from alignment.config.errors import OptionError

_LOSS = "derive a Method and override losses(), see docs/guides/extending.md"
_PASSES = "derive a Method and override before_training(), scored() or losses(), see docs/guides/extending.md"
_OPTIMIZER = "pass optimizers=(optimizer, scheduler), or set optim, learning_rate and weight_decay"
_SCHEDULE = "pass optimizers=(optimizer, scheduler), or set lr_scheduler_type and lr_scheduler_kwargs"
_ROWS = "map the dataset before passing it, or set column_map"
_ORDER = "windows are planned over all ranks; set data_seed or max_tokens_per_batch, or sort the dataset"
_MODEL = "pass the model itself, or set model_init_kwargs and deepspeed"
_CALLBACK = "use a TrainerCallback"
_SAVING = "use a TrainerCallback with on_save"
_METRICS = "override log(), which receives every record, or use a TrainerCallback with on_log"
_GENERATION = "set the generation options, or implement a RolloutBackend"
_REWARDS = "pass reward_funcs or a judge"

NEVER_CALLED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("compute_loss", "kto_loss", "cpo_loss", "dpo_loss", "_compute_loss", "_compute_loss_liger"),
            *("compute_loss_context_manager", "_dpo_loss_fn", "_compute_kl_logps"),
        ),
        _LOSS,
    ),
    **dict.fromkeys(
        (
            *("training_step", "prediction_step", "get_batch_loss_metrics", "get_batch_logps", "forward"),
            *("concatenated_forward", "concatenated_inputs", "_forward", "null_ref_context", "evaluation_loop"),
            *("compute_reference_log_probs", "compute_ref_log_probs", "_precompute_ref_logps"),
            *("_inner_training_loop", "_prepare_inputs", "_prepare_input", "autocast_smart_context_manager"),
            *("_shift_right", "prediction_loop"),
        ),
        _PASSES,
    ),
    **dict.fromkeys(
        (
            *("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"),
            *(
                "get_decay_parameter_names",
                "get_optimizer_group",
                "get_learning_rates",
                "get_num_trainable_parameters",
            ),
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(("create_scheduler", "_get_learning_rate"), _SCHEDULE),
    **dict.fromkeys(
        (
            *("_prepare_dataset", "tokenize_row", "_tokenize", "build_tokenized_answer", "_get_kl_dataset"),
            *("_prepare_non_packed_dataloader", "_prepare_packed_dataloader", "process_vision_row"),
            *("_set_signature_columns_if_needed", "_remove_unused_columns", "_get_collator_with_removed_columns"),
        ),
        _ROWS,
    ),
    **dict.fromkeys(
        (
            *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_dataloader"),
            *("_get_train_sampler", "_get_eval_sampler", "num_examples", "num_tokens", "get_batch_samples"),
            *(
                "get_total_train_batch_size",
                "set_initial_training_values",
                "get_tp_size",
                "get_cp_size",
                "get_sp_size",
            ),
        ),
        _ORDER,
    ),
    **dict.fromkeys(
        (
            *(
                "_wrap_model",
                "call_model_init",
                "_create_model_from_path",
                "_prepare_peft_model",
                "_prepare_deepspeed",
            ),
            *("_prepare_model_for_kbit_training", "_enable_gradient_checkpointing", "_activate_neftune"),
            *("create_accelerator_and_postprocess", "propagate_args_to_deepspeed", "_build_accelerator_args"),
        ),
        _MODEL,
    ),
    **dict.fromkeys(
        ("_save_checkpoint", "_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model"),
        _SAVING,
    ),
    **dict.fromkeys(
        ("_maybe_log_save_evaluate", "_evaluate", "_determine_best_metric", "floating_point_ops", "store_flos"),
        _CALLBACK,
    ),
    **dict.fromkeys(("store_metrics", "compute_metrics"), _METRICS),
    **dict.fromkeys(
        ("generate_from_model", "generate_from_model_and_ref", "_generate", "_generate_vllm", "_move_model_to_vllm"),
        _GENERATION,
    ),
    "_calculate_rewards_from_functions": _REWARDS,
    "visualize_samples": "set eval_strategy, which logs scores of the evaluation set",
    "hyperparameter_search": "start a separate run for each set of options",
}


def check_overrides(trainer: type, base: type) -> None:
    """Refuse a trainer whose class overrides a method that is never called.

    Args:
        trainer: the class of the trainer.
        base: this class and its bases belong to this package.

    Raises:
        OptionError: naming the first such method, and the alternative.
    """
    for kind, name in _overridden(trainer, base):
        raise OptionError(f"{kind.__name__}.{name}: never called, so it would be ignored; {NEVER_CALLED[name]}")


def check_saving(trainer: type, base: type, saves: bool) -> None:
    """Refuse a trainer whose class overrides ``save_model`` if checkpoints are written, which do not call it.

    Args:
        trainer: the class of the trainer.
        base: this class and its bases belong to this package.
        saves: whether the run writes checkpoints.

    Raises:
        OptionError: if checkpoints are written and the class overrides it.
    """
    owners = [kind for kind in trainer.__mro__ if kind not in base.__mro__ and "save_model" in vars(kind)]
    if saves and owners:
        raise OptionError(
            f"{owners[0].__name__}.save_model: checkpoints do not call it, so they would lack what it "
            f"adds; {_SAVING}, or set save_strategy: no and call save_model yourself"
        )


def check_attributes(trainer: object) -> None:
    """Refuse a trainer instance on which such a method was set, as in ``trainer.compute_loss = own``.

    Raises:
        OptionError: naming the method and the alternative.
    """
    for name in vars(trainer).keys() & NEVER_CALLED.keys():
        raise OptionError(f"trainer.{name}: never called, so it would be ignored; {NEVER_CALLED[name]}")


def _overridden(trainer: type, base: type) -> Iterator[tuple[type, str]]:
    for kind in trainer.__mro__:
        if kind in base.__mro__:
            continue
        for name in NEVER_CALLED:
            own = vars(kind).get(name)
            if callable(own) or isinstance(own, (staticmethod, classmethod, property)):
                yield kind, name
