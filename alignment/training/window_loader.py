"""Load the windows of an epoch, optionally with worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader

from alignment.data.batching import AnyBatch, EpochWindows
from alignment.data.windows import WindowPlan, WindowSampler
from alignment.internals.torch import stop_workers
from alignment.run.protection import ignore_stop_signals
from alignment.run.ranks import rank
from alignment.training.context import RunContext
from alignment.training.data import PreparedData


def windows_of_epoch(
    context: RunContext, data: PreparedData, sampler: WindowSampler, last: int
) -> Iterator[tuple[WindowPlan, Sequence[AnyBatch]]]:
    """Yield the plan and this rank's micro-batches of the windows from the sampler's position up to ``last``."""
    workers = context.args.dataloader_num_workers
    loader = DataLoader(
        EpochWindows(context.method.kind.collate, data.batched, sampler, sampler.epoch, rank()),
        batch_size=None,
        sampler=range(sampler.step, last),
        num_workers=workers,
        # Workers send bytes: as shared tensors, a large window would exceed the limit on open files.
        collate_fn=pickle.dumps if workers else None,
        # Its iterator draws a random number; from the global generator, later draws would depend on restarts.
        generator=torch.Generator().manual_seed(context.args.seed),
        worker_init_fn=ignore_stop_signals,
    )
    windows = iter(loader)
    try:
        for window in windows:
            yield pickle.loads(window) if isinstance(window, bytes) else window
    finally:
        stop_workers(windows)
