"""How a run goes on: which checkpoint it takes, what has to be the same, and what is put back.

Everything that can be refused is refused before a model is loaded, and nothing on disk has changed by then.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.config.errors import CheckpointError, OptionError, did_you_mean, show
from alignment.engines.checkpoints.folder import checkpoints
from alignment.engines.checkpoints.fragments import check_fragments
from alignment.engines.checkpoints.manifest import MANIFEST, Manifest
from alignment.engines.collectives import gathered, on_first_rank
from alignment.engines.launch_env import rank, world_size
from alignment.training.checkpointing.fingerprints import identity
from alignment.training.checkpointing.output_folder import LOG, check_output_folder, holds_model
from alignment.training.checkpointing.present import Present

LATEST = "latest"
_OPTION = "resume_from_checkpoint"
_OF_THE_BEST = ("metric_for_best_model", "greater_is_better")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a run can go on from.

    Attributes:
        folder: its folder.
        manifest: its manifest.
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return self.manifest.step


@dataclass
class Candidates:
    """What there is to choose from, the newest first, and what is wrong with the rest."""

    found: list[Checkpoint] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find(output_dir: Path, asked: str | bool, method: str) -> Candidates:
    """The checkpoints that a run may go on from, as far as their names, sizes and headers tell; none: begin anew.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or the one that was named cannot.
        OutputError: the output folder holds something else.
    """
    if asked is True or asked == LATEST:
        return _newest(output_dir, method)
    folder = _named(output_dir, str(asked))
    manifest = _usable(folder, method)
    if folder.resolve().parent != output_dir.resolve():
        check_output_folder(output_dir)
    return Candidates([Checkpoint(folder, manifest)])


def _named(output_dir: Path, asked: str) -> Path:
    """The folder that was asked for, by its path or by its name in the output folder."""
    given = Path(asked).expanduser()
    folder = given if given.exists() or not (output_dir / given).exists() else output_dir / given
    if not folder.is_dir():
        near = did_you_mean(given.name, [LATEST, *(path.name for path in checkpoints(output_dir))])
        raise CheckpointError(f"{_OPTION}={asked!r}: there is no such folder{near or f'; set {LATEST}, or a folder'}")
    if not (folder / MANIFEST).exists() and checkpoints(folder):
        raise CheckpointError(
            f"{_OPTION}={asked!r}: it holds checkpoints and is none; set {_OPTION}: {LATEST} with output_dir: "
            f"{asked}, or one of {', '.join(path.name for path in checkpoints(folder))}"
        )
    return folder


def _newest(output_dir: Path, method: str) -> Candidates:
    folders = checkpoints(output_dir) if output_dir.is_dir() else []
    if not folders:
        check_output_folder(output_dir, earlier_run=True)
        if holds_model(output_dir):
            raise CheckpointError(
                f"{_OPTION}: {output_dir} holds a model and no checkpoint, so there is nothing to go on from, and "
                "beginning anew would replace the model; choose another output_dir"
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
    """Leave out the checkpoints of other runs: this one is that of the log, or else that of the newest checkpoint."""
    known = {checkpoint.manifest.run for checkpoint in candidates.found}
    run = run if run in known else next((one.manifest.run for one in candidates.found), None)
    for checkpoint in candidates.found:
        if checkpoint.manifest.run != run:
            candidates.problems.append(f"{checkpoint.folder}: it is of another run")
    candidates.found = [checkpoint for checkpoint in candidates.found if checkpoint.manifest.run == run]


def _run_of_log(output_dir: Path) -> str | None:
    """The name of the run that began the log, as far as it can be read."""
    try:
        with (output_dir / LOG).open(encoding="utf-8") as file:
            run = json.loads(file.readline()).get("run")
    except (OSError, ValueError, AttributeError):
        return None
    return run if isinstance(run, str) else None


def _usable(folder: Path, method: str) -> Manifest:
    """The manifest of a checkpoint whose files are there, of the sizes and with the headers that they should have."""
    manifest = Manifest.read(folder)
    if manifest.method != method:
        raise CheckpointError(f"{folder}: it is of the method {manifest.method}, and this run's is {method}")
    if not manifest.resumable:
        raise CheckpointError(f"{folder}: it holds the model only (save_only_model), so no run can go on from it")
    manifest.check_files(folder)
    check_fragments(folder)
    return manifest


def _none_usable(output_dir: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{_OPTION}: {output_dir} has checkpoints and none to go on from: {'; '.join(problems)}. To begin anew, "
        "choose another output_dir"
    )


def choose(
    output_dir: Path,
    asked: str | bool,
    method: str,
    refuse: Callable[[Checkpoint], None],
    tell: Callable[[str], None],
) -> Checkpoint | None:
    """The newest whole checkpoint, every byte of which was read and compared; None: begin anew. Collective.

    Args:
        output_dir: of the run.
        asked: ``latest`` or True, or a folder.
        method: of the run.
        refuse: raises where the run is not that of a checkpoint; called on the first rank.
        tell: prints a line on the first rank.

    Raises:
        CheckpointError: as :func:`find`; and where the one that was named is damaged, or no other is left.
        OptionError: what ``refuse`` says.
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
    """What is wrong with this rank's share of the files."""
    share = checkpoint.manifest.shares(world_size())[rank()]
    try:
        checkpoint.manifest.check_contents(checkpoint.folder, share)
    except CheckpointError as error:
        return str(error)
    return None


def check_same_run(checkpoint: Checkpoint, present: Present, *, anyway: bool, tell: Callable[[str], None]) -> None:
    """Refuse a checkpoint of a run whose numbers are others, naming each difference with both values.

    Args:
        checkpoint: to go on from.
        present: the run as it is now.
        anyway: only list the differences.
        tell: prints a line.

    Raises:
        OptionError: another window, or a difference that is not to be overridden.
    """
    manifest = checkpoint.manifest
    _check_window(manifest.window, present)
    differences = list(_differences(manifest, present))
    if differences and not anyway:
        raise OptionError(
            f"{_OPTION}: {checkpoint.folder.name} is of a run with other numbers: {'; '.join(differences)}. Set them "
            "as they were, or resume_anyway: true to go on with the new ones"
        )
    for difference in differences:
        tell(f"resume_anyway: {difference}")


def _check_window(before: int, present: Present) -> None:
    if before == present.window:
        return
    raise OptionError(
        f"{_OPTION}: a step of this run takes {present.window} rows on {world_size()} rank(s), and took {before}; set "
        f"{_fitting(before, present.micro_batch, world_size())}"
    )


def _fitting(window: int, micro_batch: int, ranks: int) -> str:
    """The batch and the accumulation that make up a window, with the largest micro-batch up to the present one."""
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
        yield f"the steps of the run were {manifest.total_steps}, are {present.total_steps}"


def _unasked(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an option counts only where another one asks for it, and one of the two runs did not."""
    return name in _OF_THE_BEST and None in (was.get(name), now.get(name))


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not there"
    value = values[name]
    return value if isinstance(value, str) else show(value).rpartition(" (")[0] or show(value)
