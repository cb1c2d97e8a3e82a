"""Resume a run: choose a checkpoint that is intact and fits the run before a model is loaded, and restore it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LambdaLR

from alignment.checkpoint.fingerprints import without_path
from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.fragments import ExportedTensor, describe_split
from alignment.checkpoint.frozen import frozen_file
from alignment.checkpoint.manifest import Manifest
from alignment.checkpoint.optimizer_state import group_settings, read_fragments, restore_group_settings
from alignment.checkpoint.run_folder import check_output_folder, holds_model, holds_run
from alignment.checkpoint.run_state import RunState
from alignment.checkpoint.tensors import TensorFile
from alignment.checkpoint.writer import STATE, TrainedEngines, own_state_file
from alignment.config.errors import CheckpointError, OptionError, counted, did_you_mean
from alignment.config.fields import option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.engines.collectives import on_first_rank, together
from alignment.internals.torch import take_scheduled_rates
from alignment.run.ranks import rank, tell, world_size

LATEST = "latest"
_OPTION = "resume_from_checkpoint"
_OF_THE_BEST = ("metric_for_best_model", "greater_is_better")
# Parts that replace those of the state: releases that could rewind recorded the omitted windows in it.
_AMENDED = "run_state.amended.json"


class Checkpoint(NamedTuple):
    """A checkpoint that a run can resume from: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.manifest.step


def find(output_dir: Path, asked: str | bool, method: str) -> tuple[list[Checkpoint], list[str]]:
    """Return the complete checkpoints of a method, newest first, and what is wrong with the others.

    Reads only manifests. ``asked`` is ``latest`` or True, or a folder.

    Raises:
        CheckpointError: if there are checkpoints but none is usable, or the requested one is not.
        OutputError: if the output folder contains something else.
    """
    if asked not in (True, LATEST):
        checkpoint = _usable(_named(output_dir, str(asked)), method)
        if checkpoint.folder.resolve().parent != output_dir.resolve():
            check_output_folder(output_dir)
        return [checkpoint], []
    found, problems = list[Checkpoint](), list[str]()
    for folder in reversed(checkpoints(output_dir)):
        try:
            found.append(_usable(folder, method))
        except CheckpointError as error:
            problems.append(str(error))
    if problems and not found:
        raise _none_usable(output_dir, problems)
    if not found:
        check_output_folder(output_dir, overwrite=holds_run(output_dir))
        if holds_model(output_dir):
            raise CheckpointError(
                f"{_OPTION}: {output_dir} contains a model but no checkpoint to resume from, and starting over would "
                "replace the model; choose another output_dir"
            )
    return found, problems


def _named(output_dir: Path, asked: str) -> Path:
    """Return the requested folder, by its path or by its name in the output folder."""
    given = Path(asked).expanduser()
    folder = given if given.exists() or not (output_dir / given).exists() else output_dir / given
    if not folder.is_dir():
        near = did_you_mean(given.name, [LATEST, *(path.name for path in checkpoints(output_dir))])
        raise CheckpointError(
            f"{_OPTION}={asked!r}: no such folder{near or f'; set {LATEST} or the path of a checkpoint'}"
        )
    return folder


def _usable(folder: Path, method: str) -> Checkpoint:
    manifest = Manifest.read(folder)
    if manifest.method != method:
        raise CheckpointError(f"{folder}: was written by method {manifest.method}, but this run's method is {method}")
    if not manifest.resumable:
        raise CheckpointError(f"{folder}: contains only the model (save_only_model), so it cannot be resumed from")
    manifest.check_files(folder)
    return Checkpoint(folder, manifest)


def _none_usable(output_dir: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{_OPTION}: no checkpoint in {output_dir} can be resumed from: {'; '.join(problems)}. To start over, "
        "choose another output_dir"
    )


def choose(output_dir: Path, asked: str | bool, current: Manifest, *, anyway: bool) -> Checkpoint | None:
    """Return the newest intact checkpoint, after comparing its checksums; None starts a new run. Collective.

    Args:
        output_dir, asked: as for :func:`find`.
        current: the manifest of checkpoints of the current run.
        anyway: accept different settings, which are only listed.

    Raises:
        CheckpointError: as in :func:`find`, or if the requested checkpoint is damaged or all are.
        OptionError: if the checkpoint is of a run with different settings.
    """
    found, problems = on_first_rank(lambda: find(output_dir, asked, current.method))
    for checkpoint in found:
        on_first_rank(lambda: check_same_run(checkpoint, current, anyway=anyway))  # noqa: B023 - called now
        try:
            with together():
                share = checkpoint.manifest.share(rank(), world_size())
                checkpoint.manifest.check_contents(checkpoint.folder, share)
        except CheckpointError as damage:
            problems.append(str(damage))
            continue
        for problem in problems:
            tell(f"{_OPTION}: {problem}")
        return checkpoint
    if problems:
        raise _none_usable(output_dir, problems)
    return None


def check_same_run(checkpoint: Checkpoint, current: Manifest, *, anyway: bool) -> None:
    """Raise OptionError if a checkpoint is of a run with different settings, listing each with both values.

    With ``anyway``, the settings are only listed, unless the window differs.
    """
    before = checkpoint.manifest
    if before.window != current.window:
        raise OptionError(
            f"{_OPTION}: a step has {current.window} rows on {counted(world_size(), 'rank')}, but had "
            f"{before.window}; set per_device_train_batch_size, gradient_accumulation_steps and the number of ranks "
            f"so that their product is {before.window}"
        )
    declared = option_fields(METHODS[current.method] if current.method in METHODS.entries else AlignmentConfig)
    defaults = {one.name: one.default for one in declared}
    added = {name: value for name, value in defaults.items() if name in current.options}  # since it was written
    unlisted = {name: value for name, value in defaults.items() if name in before.options}  # now only if it is set
    differences = [
        *_differences({**added, **before.options}, {**unlisted, **current.options}, lambda value: value),
        *_differences(before.fingerprints, current.fingerprints, without_path),
    ]
    if current.total_steps < before.total_steps:
        differences.append(f"the number of steps was {before.total_steps}, is {current.total_steps}")
    if differences and not anyway:
        raise OptionError(
            f"{_OPTION}: {checkpoint.folder.name} was written with different settings: {'; '.join(differences)}. "
            "Restore the old values, or set resume_anyway: true to continue with the new ones"
        )
    for difference in differences:
        tell(f"resume_anyway: {difference}")


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], compared: Callable[[Any], Any]) -> Iterator[str]:
    for name in sorted(was.keys() | now.keys()):
        # These only matter to a run that sets both of them.
        unset = name in _OF_THE_BEST and None in (was.get(name), now.get(name))
        if compared(was.get(name)) != compared(now.get(name)) and not unset:
            old, new = (values.get(name, "missing") for values in (was, now))
            old, new = (value if isinstance(value, str) else json.dumps(value) for value in (old, new))
            yield f"{name} was {old}, is {new}"


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
            f"{_OPTION}: saved with {describe_split(manifest.stage, ranks)}, resuming with "
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
                f"{_OPTION}: total steps changed from {manifest.total_steps} to {current.total_steps}; "
                f"the schedule covers all of them, so the learning rate is now {policy.learning_rate:.4g}"
            )


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))  # its checksum has been compared
    return content
