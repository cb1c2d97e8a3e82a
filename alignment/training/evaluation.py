"""Evaluate a whole dataset as one window, without gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator

from alignment.data.batching import MicroBatches
from alignment.data.windows import WindowPlan, evaluation_plan
from alignment.reporting.metrics import means
from alignment.reporting.progress import Progress
from alignment.run.ranks import rank, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, order_seed
from alignment.training.window import WindowPass


def evaluation_window(context: RunContext, data: PreparedData) -> tuple[WindowPlan, MicroBatches]:
    """Return the plan of a whole dataset as one window, and this rank's micro-batches."""
    args, method = context.args, context.method
    plan = evaluation_plan(
        data.table,
        world_size=world_size(),
        batch_size=args.eval_batch_size,
        seed=order_seed(args),
        draw_partners=method.draws_partners,
        max_tokens=context.data.max_tokens,
        packs=context.data.packs,
    )
    return plan, MicroBatches(method.kind.collate, data.batched, plan, rank())


def evaluation_windows(context: RunContext) -> Iterator[tuple[WindowPlan, MicroBatches, PreparedData]]:
    """Yield the windows of the run's evaluation sets."""
    for data in context.data.eval.values():
        yield *evaluation_window(context, data), data


def evaluate(context: RunContext, window_pass: WindowPass, data: PreparedData, prefix: str) -> dict[str, float]:
    """Return loss and metrics of a dataset, named ``{prefix}_loss`` and so on, with runtime and speed.

    Means are over all rows and the KL is clamped once, so results do not depend on the batch size or number of ranks.
    """
    method, start = context.method, time.monotonic()
    plan, batches = evaluation_window(context, data)
    progress = Progress(len(plan.micro_batches) * method.passes, prefix, context.args.disable_tqdm, window_pass.device)
    try:
        items, _ = window_pass(plan, batches, data, train=False, progress=progress)
    finally:
        progress.close()
    seconds = time.monotonic() - start
    if context.answers is not None:
        context.answers(window_pass.models, data, prefix)
    result = {f"{prefix}_{name}": value for name, value in means(items, method.logs_sums).items()}
    return result | {
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": plan.counts.rows / seconds,
        f"{prefix}_steps_per_second": len(plan.micro_batches) / seconds,
    }
