"""Options that are set on ``trainer.args`` after the trainer was created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.compatibility.verdicts import judged_names
from alignment.config.errors import OptionError, listing, setting
from alignment.config.fields import words
from alignment.config.options import AlignmentConfig

# Read when training begins, or during training. tests/engine/test_options_set_later.py compares both lists with the
# options that a run reads.
AT_TRAINING = frozenset(
    words(
        """
        dataloader_num_workers disable_tqdm eval_delay eval_on_start eval_steps eval_strategy greater_is_better
        include_num_input_tokens_seen include_tokens_per_second load_best_model_at_end logging_first_step logging_steps
        logging_strategy loss_spike_factor max_bad_steps max_steps merged_output_dir metric_for_best_model
        num_train_epochs on_bad_step resume_anyway resume_from_checkpoint run_name save_only_model
        save_steps save_strategy save_total_limit
        """
    )
)
# Read when the engines are built, which accessing the model triggers before training does.
AT_BUILDING = frozenset(
    words(
        """
        adam_beta1 adam_beta2 adam_epsilon disable_dropout full_determinism learning_rate lr_scheduler_kwargs
        lr_scheduler_type tf32 warmup_ratio warmup_steps weight_decay
        """
    )
)


def take_over(args: AlignmentConfig, before: Mapping[str, Any], *, built: bool) -> dict[str, Any]:
    """Check options that were changed since a trainer read them; return their current values.

    Args:
        args: the trainer's options.
        before: their values when the trainer read them.
        built: whether the engines are built.

    Raises:
        OptionError: if one cannot be used, or was changed too late to take effect.
    """
    if args.values() == before:
        return dict(before)
    args.check_again()
    now = args.values()
    changed = {name for name, value in now.items() if value != before[name]} - judged_names(args)
    late = sorted(changed - AT_TRAINING - (frozenset() if built else AT_BUILDING))
    if late:
        read = "the trainer built its engines" if set(late) <= AT_BUILDING else "the trainer was created"
        raise OptionError(
            f"{setting(late[0], now[late[0]])}: {listing(late)} changed after {read}, too late to take effect; set "
            "options before, or create a new trainer"
        )
    return now
