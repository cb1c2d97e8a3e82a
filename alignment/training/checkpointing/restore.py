"""Restore a checkpoint into a run whose engines are in their initial state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from alignment.checkpoint.fragments import describe_split
from alignment.checkpoint.frozen import frozen_file
from alignment.checkpoint.optimizer_state import (
    ExportedTensor,
    group_settings,
    read_fragments,
    restore_group_settings,
)
from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError
from alignment.engines.collectives import together
from alignment.engines.scoring import PolicyEngine
from alignment.internals.torch import take_scheduled_rates
from alignment.run.ranks import rank, world_size
from alignment.training.checkpointing.amendments import amended
from alignment.training.checkpointing.present import Present
from alignment.training.checkpointing.resume import Checkpoint
from alignment.training.checkpointing.writer import STATE, own_state_file
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines


def restore(checkpoint: Checkpoint, context: RunContext, engines: RunEngines, present: Present) -> None:
    """Restore weights, optimizer and run state; collective.

    Args:
        checkpoint: complete, and of this run.
        context: the run, with all parts of its state registered.
        engines: built for training.
        present: properties of the current run.

    Raises:
        CheckpointError: if it has a state unknown to this run, or requires the original ranks and ZeRO stage.
    """
    folder, manifest = checkpoint.folder, checkpoint.manifest
    settings, same_ranks = OptimizerSettings(engines.policy), manifest.world_size == world_size()
    with together():
        shared, own = (
            amended(folder, _read(folder / STATE)),
            _read(folder / own_state_file(rank() if same_ranks else 0)),
        )
        others = [] if same_ranks else [_read(folder / own_state_file(n)) for n in range(manifest.world_size)]
        exported = {name: ExportedTensor(*place) for name, place in shared.pop("exported").items()}
        unknown = context.run_state.unknown(shared, own)
        if unknown:
            raise CheckpointError(
                f"{folder}: has a state of {', '.join(unknown)}, which is unknown to this run; resume with the "
                "release and the options that wrote it"
            )
    read_fragments(engines.policy, folder, exported=exported)
    if not same_ranks or manifest.stage != engines.stage:
        _tell_split(checkpoint, context, engines, same_ranks)
        shared.pop("rollout", None)  # memory limits differ with the number of ranks
    with together():
        _restore_frozen(checkpoint, engines, same_ranks)
        context.run_state.load(shared, own, others, rank())
    if present.options != manifest.options or present.total_steps != manifest.total_steps:
        rate = engines.policy.learning_rate
        settings.restore()
        if present.total_steps != manifest.total_steps:
            context.tell(
                f"resume_from_checkpoint: total steps changed from {manifest.total_steps} to {present.total_steps}; "
                f"the schedule covers all of them, so the learning rate is now {engines.policy.learning_rate:.4g} "
                f"instead of {rate:.4g}"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return content


def _restore_frozen(checkpoint: Checkpoint, engines: RunEngines, same_ranks: bool) -> None:
    """Restore this rank's frozen tensors; with a different number of ranks, all use those of the first rank."""
    name = frozen_file(rank() if same_ranks else 0, checkpoint.manifest.world_size)
    if name in checkpoint.manifest.files:
        with TensorFile(checkpoint.folder / name) as file:
            engines.frozen.restore(file)


def _tell_split(checkpoint: Checkpoint, context: RunContext, engines: RunEngines, same_ranks: bool) -> None:
    before = describe_split(checkpoint.manifest.stage, checkpoint.manifest.world_size)
    now = describe_split(engines.stage, world_size())
    random = "" if same_ranks else "; random streams are reseeded by seed, step and rank"
    context.tell(f"resume_from_checkpoint: saved with {before}, resuming with {now}: equal up to rounding{random}")


class OptimizerSettings:
    """Learning rates and weight decays from the run's own options, kept while a checkpoint's replace them.

    Args:
        policy: an engine that has not been restored yet.
    """

    def __init__(self, policy: PolicyEngine) -> None:
        self.policy, self._groups = policy, group_settings(policy)
        self._peaks = list(getattr(policy.scheduler, "base_lrs", ()))

    def restore(self) -> None:
        """Put them back, with the schedule's learning rates at the current step.

        A schedule that is not a function of the step keeps its restored state.
        """
        scheduler = self.policy.scheduler
        if isinstance(scheduler, LambdaLR):
            restore_group_settings(self.policy, self._groups)
            scheduler.base_lrs = self._peaks
            take_scheduled_rates(scheduler)
