"""Choose the checkpoint to resume from, and check that it fits the run, before a model is loaded.

A checkpoint is complete if its manifest matches the names and sizes of its files. Checksums are compared once, of the
chosen checkpoint; if it is damaged, the next older one is chosen instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from alignment.checkpoint.fingerprints import without_path
from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.checkpoint.run_folder import check_output_folder, holds_model, holds_run
from alignment.config.errors import CheckpointError, OptionError, counted, did_you_mean
from alignment.engines.collectives import gathered, on_first_rank
from alignment.run.ranks import rank, world_size

LATEST = "latest"
_OPTION = "resume_from_checkpoint"
_OF_THE_BEST = ("metric_for_best_model", "greater_is_better")


class Checkpoint(NamedTuple):
    """A checkpoint that a run can resume from: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.manifest.step


def find(output_dir: Path, asked: str | bool, method: str) -> tuple[list[Checkpoint], list[str]]:
    """Return the complete checkpoints, newest first, and what is wrong with the others; reads only manifests.

    Args:
        output_dir: the run's output folder.
        asked: ``latest`` or True, or a folder.
        method: the run's method.

    Raises:
        CheckpointError: if there are checkpoints but none is usable, or the requested one is not.
        OutputError: if the output folder contains something else.
    """
    if not _is_latest(asked):
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


def _is_latest(asked: str | bool) -> bool:
    return asked is True or asked == LATEST


def _named(output_dir: Path, asked: str) -> Path:
    """Return the requested folder, by its path or by its name in the output folder."""
    given = Path(asked).expanduser()
    folder = given if given.exists() or not (output_dir / given).exists() else output_dir / given
    if not folder.is_dir():
        near = did_you_mean(given.name, [LATEST, *(path.name for path in checkpoints(output_dir))])
        raise CheckpointError(
            f"{_OPTION}={asked!r}: no such folder{near or f'; set {LATEST} or the path of a checkpoint'}"
        )
    inside = [path.name for path in checkpoints(folder)]
    if inside and not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{_OPTION}={asked!r}: contains checkpoints but is not one; set {_OPTION}: {LATEST} with output_dir: "
            f"{asked}, or set one of {', '.join(inside)}"
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


def choose(
    output_dir: Path, asked: str | bool, current: Manifest, *, anyway: bool, tell: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest intact checkpoint, after comparing its checksums; None starts a new run. Collective.

    Args:
        output_dir: the run's output folder.
        asked: ``latest`` or True, or a folder.
        current: the manifest of checkpoints of the current run.
        anyway: as for :func:`check_same_run`.
        tell: prints a line on the first rank.

    Raises:
        CheckpointError: as in :func:`find`, or if the requested checkpoint is damaged or all are.
        OptionError: as in :func:`check_same_run`.
    """
    found, problems = on_first_rank(lambda: find(output_dir, asked, current.method))
    for checkpoint in found:
        on_first_rank(lambda: check_same_run(checkpoint, current, anyway=anyway, tell=tell))  # noqa: B023 - called now
        damage = next((one for one in gathered(_damage(checkpoint)) if one is not None), None)
        if damage is None:
            for problem in problems:
                tell(f"{_OPTION}: {problem}")
            return checkpoint
        if not _is_latest(asked):
            raise CheckpointError(f"{_OPTION}: {damage}")
        problems.append(damage)
    if problems:
        raise _none_usable(output_dir, problems)
    return None


def _damage(checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with this rank's share of the files, or None."""
    manifest = checkpoint.manifest
    try:
        manifest.check_contents(checkpoint.folder, manifest.shares(world_size())[rank()])
    except CheckpointError as error:
        return str(error)
    return None


def check_same_run(checkpoint: Checkpoint, current: Manifest, *, anyway: bool, tell: Callable[[str], None]) -> None:
    """Refuse a checkpoint of a run with different settings, listing each difference with both values.

    Args:
        checkpoint: the checkpoint to resume from.
        current: the manifest of checkpoints of the current run.
        anyway: only list the differences.
        tell: prints a line.

    Raises:
        OptionError: if the window differs, or anything else without ``anyway``.
    """
    manifest = checkpoint.manifest
    if manifest.window != current.window:
        raise OptionError(
            f"{_OPTION}: a step has {current.window} rows on {counted(world_size(), 'rank')}, but had "
            f"{manifest.window}; set per_device_train_batch_size, gradient_accumulation_steps and the number of ranks "
            f"so that their product is {manifest.window}"
        )
    differences = list(_differences(manifest, current))
    if differences and not anyway:
        raise OptionError(
            f"{_OPTION}: {checkpoint.folder.name} was written with different settings: {'; '.join(differences)}. "
            "Restore the old values, or set resume_anyway: true to continue with the new ones"
        )
    for difference in differences:
        tell(f"resume_anyway: {difference}")


def _differences(before: Manifest, current: Manifest) -> Iterator[str]:
    for was, now, compared in (
        (before.options, current.options, lambda value: value),
        (before.fingerprints, current.fingerprints, without_path),
    ):
        for name in sorted(was.keys() | now.keys()):
            # These only matter to a run that sets both of them.
            unset = name in _OF_THE_BEST and None in (was.get(name), now.get(name))
            if compared(was.get(name)) != compared(now.get(name)) and not unset:
                pair = [values.get(name, "missing") for values in (was, now)]
                old, new = (value if isinstance(value, str) else json.dumps(value) for value in pair)
                yield f"{name} was {old}, is {new}"
    if current.total_steps < before.total_steps:
        yield f"the number of steps was {before.total_steps}, is {current.total_steps}"
