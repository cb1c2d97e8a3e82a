"""The windows of a training run: from options and tokenised rows to the sampler."""

from __future__ import annotations

import math

from alignment.config.errors import DataError
from alignment.config.options import AlignmentConfig
from alignment.data.windows import WindowSampler
from alignment.engines.launch_env import world_size
from alignment.trainers.data_setup import PreparedData, order_seed
from alignment.trainers.method import AnyMethod


def window_sampler(data: PreparedData, method: AnyMethod, args: AlignmentConfig) -> WindowSampler:
    """The sampler of the training data.

    Raises:
        DataError: the last window is to be dropped, and there is no other.
    """
    sampler = WindowSampler(
        data.table,
        world_size=world_size(),
        batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        seed=order_seed(args),
        draw_partners=method.draws_partners,
        stratify=args.stratify_labels,
        drop_last=args.dataloader_drop_last,
        max_tokens=args.max_tokens_per_batch,
    )
    if sampler.steps_per_epoch == 0:
        raise DataError(
            f"{data.where}: {len(data.table)} rows are fewer than one window of {sampler.window}; set "
            "dataloader_drop_last: false or a smaller batch"
        )
    return sampler


def total_steps(args: AlignmentConfig, sampler: WindowSampler) -> int:
    """Optimizer steps of the whole run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)
