"""Restore a checkpoint into a run whose engines are in their initial state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from alignment.checkpoint.fragments import ExportedTensor, describe_split
from alignment.checkpoint.frozen import frozen_file
from alignment.checkpoint.manifest import Manifest
from alignment.checkpoint.optimizer_state import group_settings, read_fragments, restore_group_settings
from alignment.checkpoint.resume import Checkpoint
from alignment.checkpoint.run_state import RunState
from alignment.checkpoint.tensors import TensorFile
from alignment.checkpoint.writer import STATE, TrainedEngines, own_state_file
from alignment.config.errors import CheckpointError
from alignment.engines.collectives import together
from alignment.internals.torch import take_scheduled_rates
from alignment.run.console import tell
from alignment.run.ranks import rank, world_size

# Parts that replace those of the state: releases that could rewind recorded the omitted windows in it.
_AMENDED = "run_state.amended.json"


def restore(checkpoint: Checkpoint, engines: TrainedEngines, state: RunState, current: Manifest) -> None:
    """Restore weights, optimizer and run state from a complete checkpoint of this run; collective.

    Raises:
        CheckpointError: if it has a state unknown to this run, or requires the original ranks and ZeRO stage.
    """
    folder, manifest = checkpoint
    policy, ranks = engines.policy, manifest.world_size
    own_groups, own_peaks = group_settings(policy), list(getattr(policy.scheduler, "base_lrs", ()))
    same_ranks = ranks == world_size()
    sources = [rank()] if same_ranks else range(ranks)  # whose files are read
    with together():
        shared, former = _read(folder / STATE), [_read(folder / own_state_file(each)) for each in sources]
        if (folder / _AMENDED).exists():
            shared |= _read(folder / _AMENDED)
        exported = {name: ExportedTensor(*place) for name, place in shared.pop("exported").items()}
        if unknown := state.unknown(shared, former[0]):
            raise CheckpointError(
                f"{folder}: has a state of {', '.join(unknown)}, which is unknown to this run; resume with the "
                "release and the options that wrote it"
            )
    read_fragments(policy, folder, exported=exported)
    if not same_ranks or manifest.stage != current.stage:
        tell(
            f"resume_from_checkpoint: saved with {describe_split(manifest.stage, ranks)}, resuming with "
            f"{describe_split(current.stage, world_size())}: equal up to rounding"
            f"{'' if same_ranks else '; random streams are reseeded by seed, step and rank'}"
        )
        shared.pop("rollout", None)  # memory limits differ with the number of ranks
    with together():
        if (name := frozen_file(sources[0], ranks)) in manifest.files:
            engines.frozen.restore(TensorFile(folder / name))
        state.load(shared, former[0] if same_ranks else state.redistributed(former, rank()))
    scheduler, changed = policy.scheduler, current.total_steps != manifest.total_steps
    if changed or current.options != manifest.options:
        if isinstance(scheduler, LambdaLR):  # a schedule that is not a function of the step keeps its restored state
            restore_group_settings(policy, own_groups)
            scheduler.base_lrs = own_peaks
            take_scheduled_rates(scheduler)
        if changed:
            tell(
                f"resume_from_checkpoint: total steps changed from {manifest.total_steps} to {current.total_steps}; "
                f"the schedule covers all of them, so the learning rate is now {policy.learning_rate:.4g}"
            )


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))  # its checksum has been compared
    return content
