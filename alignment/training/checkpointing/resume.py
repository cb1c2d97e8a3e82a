"""Choose the checkpoint to resume from and check that it fits the run.

All checks happen before a model is loaded and before anything on disk changes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.checkpoint.run_folder import LOG, check_output_folder, holds_model, holds_run
from alignment.config.errors import CheckpointError, OptionError, counted, did_you_mean, show
from alignment.engines.collectives import gathered, on_first_rank
from alignment.run.ranks import rank, world_size
from alignment.training.checkpointing.fingerprints import identity
from alignment.training.checkpointing.present import Present

LATEST = "latest"
_OPTION = "resume_from_checkpoint"
_OF_THE_BEST = ("metric_for_best_model", "greater_is_better")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a run can resume from.

    Attributes:
        folder: its folder.
        manifest: its manifest.
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.manifest.step


@dataclass
class Candidates:
    """Usable checkpoints, newest first, and the problems of the others."""

    found: list[Checkpoint] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find(output_dir: Path, asked: str | bool, method: str) -> Candidates:
    """Find checkpoints that look usable by name, manifest and sizes; an empty result starts a new run.

    Raises:
        CheckpointError: if there are checkpoints but none is usable, or the requested one is not.
        OutputError: if the output folder contains something else.
    """
    if asked is True or asked == LATEST:
        return _newest(output_dir, method)
    folder = _named(output_dir, str(asked))
    manifest = _usable(folder, method)
    if folder.resolve().parent != output_dir.resolve():
        check_output_folder(output_dir)
    return Candidates([Checkpoint(folder, manifest)])


def _named(output_dir: Path, asked: str) -> Path:
    """Return the requested folder, by its path or by its name in the output folder."""
    given = Path(asked).expanduser()
    folder = given if given.exists() or not (output_dir / given).exists() else output_dir / given
    if not folder.is_dir():
        near = did_you_mean(given.name, [LATEST, *(path.name for path in checkpoints(output_dir))])
        raise CheckpointError(
            f"{_OPTION}={asked!r}: no such folder{near or f'; set {LATEST} or the path of a checkpoint'}"
        )
    if not (folder / MANIFEST).exists() and checkpoints(folder):
        raise CheckpointError(
            f"{_OPTION}={asked!r}: contains checkpoints but is not one; set {_OPTION}: {LATEST} with output_dir: "
            f"{asked}, or set one of {', '.join(path.name for path in checkpoints(folder))}"
        )
    return folder


def _newest(output_dir: Path, method: str) -> Candidates:
    folders = checkpoints(output_dir) if output_dir.is_dir() else []
    if not folders:
        check_output_folder(output_dir, overwrite=holds_run(output_dir))
        if holds_model(output_dir):
            raise CheckpointError(
                f"{_OPTION}: {output_dir} contains a model but no checkpoint to resume from, and starting over would "
                "replace the model; choose another output_dir"
            )
        return Candidates()
    candidates = Candidates()
    for folder in reversed(folders):
        try:
            candidates.found.append(Checkpoint(folder, _usable(folder, method)))
        except CheckpointError as error:
            candidates.problems.append(str(error))
    _only_this_run(candidates, _run_of_log(output_dir))
    if not candidates.found:
        raise _none_usable(output_dir, candidates.problems)
    return candidates


def _only_this_run(candidates: Candidates, run: str | None) -> None:
    """Exclude checkpoints of other runs; the run is that of the log, or else of the newest checkpoint."""
    known = {checkpoint.manifest.run for checkpoint in candidates.found}
    run = run if run in known else next((one.manifest.run for one in candidates.found), None)
    for checkpoint in candidates.found:
        if checkpoint.manifest.run != run:
            candidates.problems.append(f"{checkpoint.folder}: belongs to another run")
    candidates.found = [checkpoint for checkpoint in candidates.found if checkpoint.manifest.run == run]


def _run_of_log(output_dir: Path) -> str | None:
    """Return the name of the run that started the log, or None if it cannot be read."""
    try:
        with (output_dir / LOG).open(encoding="utf-8") as file:
            run = json.loads(file.readline()).get("run")
    except (OSError, ValueError, AttributeError):
        return None
    return run if isinstance(run, str) else None


def _usable(folder: Path, method: str) -> Manifest:
    """Return the manifest of a checkpoint whose files have the recorded sizes."""
    manifest = Manifest.read(folder)
    if manifest.method != method:
        raise CheckpointError(f"{folder}: was written by method {manifest.method}, but this run's method is {method}")
    if not manifest.resumable:
        raise CheckpointError(f"{folder}: contains only the model (save_only_model), so it cannot be resumed from")
    manifest.check_files(folder)
    return manifest


def _none_usable(output_dir: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{_OPTION}: no checkpoint in {output_dir} can be resumed from: {'; '.join(problems)}. To start over, "
        "choose another output_dir"
    )


def choose(
    output_dir: Path,
    asked: str | bool,
    method: str,
    refuse: Callable[[Checkpoint], None],
    tell: Callable[[str], None],
) -> Checkpoint | None:
    """Return the newest complete checkpoint after comparing all checksums; None starts a new run. Collective.

    Args:
        output_dir: the run's output folder.
        asked: ``latest`` or True, or a folder.
        method: the run's method.
        refuse: raises if the checkpoint does not fit the run; called on the first rank.
        tell: prints a line on the first rank.

    Raises:
        CheckpointError: as in :func:`find`, or if the requested checkpoint is damaged or all are.
        OptionError: raised by ``refuse``.
    """
    candidates: Candidates = on_first_rank(lambda: find(output_dir, asked, method))
    problems = list(candidates.problems)
    for checkpoint in candidates.found:
        on_first_rank(functools.partial(refuse, checkpoint))
        damage = [one for one in gathered(_damage(checkpoint)) if one is not None]
        if not damage:
            for problem in problems:
                tell(f"{_OPTION}: {problem}")
            return checkpoint
        problems += damage
    if candidates.found:
        if asked is True or asked == LATEST:
            raise _none_usable(output_dir, problems)
        raise CheckpointError(f"{_OPTION}: {problems[0]}")
    return None


def _damage(checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with this rank's share of the files, or None."""
    share = checkpoint.manifest.shares(world_size())[rank()]
    try:
        checkpoint.manifest.check_contents(checkpoint.folder, share)
    except CheckpointError as error:
        return str(error)
    return None


def check_same_run(checkpoint: Checkpoint, present: Present, *, anyway: bool, tell: Callable[[str], None]) -> None:
    """Refuse a checkpoint of a run with different settings, listing each difference with both values.

    Args:
        checkpoint: the checkpoint to resume from.
        present: properties of the current run.
        anyway: only list the differences.
        tell: prints a line.

    Raises:
        OptionError: if the window differs, or anything else without ``anyway``.
    """
    manifest = checkpoint.manifest
    _check_window(manifest.window, present)
    differences = list(_differences(manifest, present))
    if differences and not anyway:
        raise OptionError(
            f"{_OPTION}: {checkpoint.folder.name} was written with different settings: {'; '.join(differences)}. "
            "Restore the old values, or set resume_anyway: true to continue with the new ones"
        )
    for difference in differences:
        tell(f"resume_anyway: {difference}")


def _check_window(before: int, present: Present) -> None:
    if before == present.window:
        return
    raise OptionError(
        f"{_OPTION}: a step has {present.window} rows on {counted(world_size(), 'rank')}, but had {before}; set "
        f"{_fitting(before, present.micro_batch, world_size())}"
    )


def _fitting(window: int, micro_batch: int, ranks: int) -> str:
    """Return settings that make up the window, with the largest micro-batch up to the current one."""
    if window % ranks:
        return f"a number of ranks that divides {window}"
    micro = next(size for size in range(micro_batch, 0, -1) if window % (size * ranks) == 0)
    batch = "" if micro == micro_batch else f"per_device_train_batch_size: {micro} and "
    return f"{batch}gradient_accumulation_steps: {window // (micro * ranks)}"


def _differences(manifest: Manifest, present: Present) -> Iterator[str]:
    for was, now, compared in (
        (manifest.options, present.options, lambda value: value),
        (manifest.fingerprints, present.fingerprints, identity),
    ):
        for name in sorted(was.keys() | now.keys()):
            if compared(was.get(name)) != compared(now.get(name)) and not _unasked(name, was, now):
                yield f"{name} was {_shown(was, name)}, is {_shown(now, name)}"
    if present.total_steps < manifest.total_steps:
        yield f"the number of steps was {manifest.total_steps}, is {present.total_steps}"


def _unasked(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an option only matters with another one that one of the two runs did not set."""
    return name in _OF_THE_BEST and None in (was.get(name), now.get(name))


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "missing"
    value = values[name]
    return value if isinstance(value, str) else show(value).rpartition(" (")[0] or show(value)
