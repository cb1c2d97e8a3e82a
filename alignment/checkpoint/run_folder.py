"""Which output folder a run may use, and which ranks share a folder.

Nothing of an earlier run is deleted: its folder is refused or resumed, or its files are moved to ``previous-N``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from alignment.checkpoint.folder import CHECKPOINT_PREFIX, checkpoint_step, checkpoints, clear_leftovers
from alignment.config.errors import DataError, OptionError, OutputError, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import barrier, from_first_rank, gathered, on_first_rank
from alignment.models.adapters.record import TRAINING_BASE
from alignment.run.activity import ACTIVITY
from alignment.run.durable import sync_folder
from alignment.run.ending import STACKS
from alignment.run.lock import LOCK, RunLock, holder
from alignment.run.ranks import local_rank, rank, tell
from alignment.run.status_file import STATUS, read_status
from alignment.run.stop import STOP_FILE

T = TypeVar("T")
LOG, COMPLETIONS, PREVIOUS = "log.jsonl", "completions.jsonl", "previous-"
REPORT = "export_report.json"  # of an export, in its folder
_OF_A_RUN = (LOG, "options.json", LOCK)
_OF_AN_ATTEMPT = (LOCK, STATUS, f".{STATUS}", STOP_FILE, STACKS)  # of a run that may have saved nothing
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "pytorch_model*.bin")
_FILES = (  # of a run besides checkpoints: logs and reports, then the model and its tokenizer
    *(LOG, COMPLETIONS, "trainer_state.json", "options.json", "report.md", "report.html", STATUS, "deepspeed.json"),
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *(TRAINING_BASE, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "README.md", "vllm-*.log"),
)
_WAYS = "choose another folder, resume (resume_from_checkpoint) or start over (overwrite_output_dir)"
_SHARED_S, _CACHE_S, _POLL_S = 10.0, 2.0, 0.1  # on NFS, files appear when the caches of other hosts expire


class RunFolder:
    """The output folder of a run, which need not exist.

    Attributes:
        lock: held by the first rank while the run uses the folder.
        held_by_earlier_run: on the first rank, whether the folder still has the results of another run.
    """

    def __init__(self, path: Path, args: AlignmentConfig) -> None:
        self.path, self.args = path, args
        self.lock = RunLock(path)
        self.held_by_earlier_run = self._entered = False
        self._made: list[Path] = []

    def check(self, inputs: Iterable[tuple[str, str]] = ()) -> None:
        """Refuse a folder that the run cannot use, on the first rank, before anything is read.

        Args:
            inputs: options and paths or Hub names of models and data; they must not be moved or overwritten.

        Raises:
            OutputError: names the reason.
        """
        if rank() != 0:
            return
        resumes = bool(self.args.resume_from_checkpoint)
        if not resumes:  # a script may still resume by an argument of train()
            check_inputs_stay(self.path, inputs)
            check_output_folder(self.path, overwrite=True)
            self.held_by_earlier_run = holds_run(self.path) and not self.args.overwrite_output_dir
        if not self.args.dry_run:  # it writes nothing, and may start before the folder's current run ends
            self.lock.refuse_if_held()
        if self.args.merged_output_dir is not None:
            merged = Path(self.args.merged_output_dir)  # that of an earlier attempt is moved aside
            check_output_folder(merged, resumes and (merged / REPORT).exists(), "merged_output_dir")

    def check_not_replaced(self, folder: Path) -> None:
        """Raise OutputError on the first rank if an untrained model would replace that of an earlier run."""
        if self.held_by_earlier_run and folder.resolve() == self.path.resolve():
            raise OutputError(
                f"output_dir: {self.path} contains an earlier run, whose model would be replaced; {_WAYS}"
            )

    def enter(self, choose: Callable[[], T | None] | None) -> T | None:
        """Lock the folder and prepare it for a new run or for a resume. Collective.

        Args:
            choose: returns the checkpoint to resume from, as this function does, or None if there is none; called in
                the locked folder before anything in it changes. None instead of a function starts a new run.

        Raises:
            OptionError: ``overwrite_output_dir`` is set in a resume.
            OutputError: the folder cannot be used.
        """
        resumes = choose is not None
        if resumes and self.args.overwrite_output_dir:  # no earlier check sees an argument of train()
            raise OptionError("resume_from_checkpoint: cannot be combined with overwrite_output_dir; set it to false")
        if not self._entered:  # otherwise, this trainer's own earlier run is moved aside
            on_first_rank(lambda: self._lock_for(resumes))
        try:
            check_shared_folder(self.path)
            checkpoint = None if choose is None else choose()
            on_first_rank(lambda: self._prepare(resumes, checkpoint is not None))
        except BaseException:
            self.release()
            raise
        ACTIVITY.folder, self.held_by_earlier_run, self._entered = self.path, False, True
        return checkpoint

    def set_newer_aside(self, step: int) -> None:
        """Move checkpoints of later steps away, damaged ones included; the run will write them again. Collective."""
        newer = [path for path in checkpoints(self.path) if (checkpoint_step(path) or 0) > step]
        place = on_first_rank(lambda: set_aside(self.path, newer))
        if place is not None:
            names = ", ".join(path.name for path in newer)
            tell(f"resume_from_checkpoint: moved {names} of later steps to {place}")

    def release(self) -> None:
        """Release the lock; a folder created for this run is removed if it is empty."""
        self._entered = False
        self.lock.release()
        with contextlib.suppress(OSError):  # it is not empty
            for path in self._made:
                path.rmdir()

    def _lock_for(self, resumes: bool) -> None:
        self._made = [path for path in (self.path, *self.path.absolute().parents) if not path.exists()]
        self.lock.acquire()
        if _has_checkpoints(self.path) and not resumes and not self.args.overwrite_output_dir:
            self.release()
            raise _not_empty(self.path)

    def _prepare(self, resumes: bool, found: bool) -> None:
        """Remove what a killed process left, and move aside what is not of this run."""
        for path in (self.path / STATUS, self.path / STOP_FILE):
            if path.is_dir():
                raise OutputError(f"output_dir: {path} must be a file, but is a folder; remove it")
        clear_leftovers(self.path)
        self._clear_stop_file()
        overwrites = self.args.overwrite_output_dir
        if not found and (overwrites or self._entered or (self.held_by_earlier_run and not resumes)):
            if (place := set_aside(self.path, left_by_earlier_run(self.path))) is not None:
                option = "overwrite_output_dir" if overwrites else "train" if self._entered else "output_dir"
                tell(f"{option}: moved the files of the earlier run to {place}")
        elif not found and resumes:
            tell(f"resume_from_checkpoint: no checkpoint in {self.path}; starting a new run")
            for path in (self.path / LOG, self.path / COMPLETIONS):  # of an attempt that saved no checkpoint
                if path.exists():
                    os.truncate(path, 0)

    def _clear_stop_file(self) -> None:
        """Remove a stop file of an earlier run, except in a job requeued by SLURM, which is still the same run."""
        path = self.path / STOP_FILE
        if not path.exists():
            return
        with contextlib.suppress(ValueError, OSError):
            job, status = os.environ.get("SLURM_JOB_ID"), read_status(self.path)
            requeued = job and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
            if requeued and status is not None and status.job == job:
                tell(f"{path}: asks this run, which SLURM has requeued, to stop; remove it before the next start")
                return
        try:
            path.unlink()
        except OSError as error:
            raise OutputError(f"{path}: would stop the run and cannot be removed: {error.strerror}") from error
        tell(f"{path}: removed, since it is from an earlier run; create it again to stop this one")


def check_output_folder(folder: Path, overwrite: bool = False, option: str = "output_dir") -> None:
    """Raise OutputError unless a folder, which need not exist, can be written and is empty or to be overwritten."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        if not existing.is_dir():
            raise OutputError(f"{option}: {existing} is not a folder; choose another {option}")
        names = [path.name for path in folder.iterdir()] if existing == folder and not overwrite else []
        if any(not name.startswith(_OF_AN_ATTEMPT) for name in names):
            raise _not_empty(folder, option)
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{option}: {folder} cannot be written: {reason}; choose another {option}") from error


def check_inputs_stay(folder: Path, inputs: Iterable[tuple[str, str]]) -> None:
    """Raise OutputError if the run would move or overwrite an input, given as an option and a path or Hub name."""
    taken = [folder.resolve(), *(path.resolve() for path in left_by_earlier_run(folder))]
    for option, name in inputs:
        path = Path(name).expanduser().resolve()
        if path.exists() and (path == taken[0] or any(part in taken[1:] for part in (path, *path.parents))):
            raise OutputError(
                f"output_dir: {folder} contains {setting(option, name)}, an input; choose another folder"
            )


def holds_run(folder: Path) -> bool:
    """Whether the folder contains a run, even one that ended early."""
    return any((folder / name).exists() for name in _OF_A_RUN) or _has_checkpoints(folder)


def holds_model(folder: Path) -> bool:
    """Whether the folder itself contains a model, as at the end of a run."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def left_by_earlier_run(folder: Path) -> list[Path]:
    """What a run left, in an order that keeps the newest checkpoint until last if moving is interrupted."""
    files = [path for pattern in _FILES for path in sorted(folder.glob(pattern))]
    return [*folder.glob(f".{CHECKPOINT_PREFIX}*"), *checkpoints(folder), *files]


def set_aside(folder: Path, moved: Sequence[Path]) -> Path | None:
    """Rename files in ``folder`` into a new ``previous-N`` there, and return that; None if there are none.

    Raises:
        OutputError: one could not be moved; it and the next ones stay where they are.
    """
    if not moved:
        return None
    numbers = [path.name.removeprefix(PREVIOUS) for path in folder.glob(f"{PREVIOUS}*")]
    target = source = folder / f"{PREVIOUS}{max((int(n) for n in numbers if n.isdecimal()), default=0) + 1}"
    try:
        target.mkdir()
        for source in moved:
            os.rename(source, target / source.name)
        sync_folder(target)
        sync_folder(folder)
    except OSError as error:
        raise OutputError(f"could not move {source} to {target}: {error.strerror}; choose another folder") from error
    return target


def check_shared_folder(folder: Path) -> None:
    """Raise OutputError unless all ranks see the lock of the first one and can write next to it. Collective."""
    owner = from_first_rank(holder(folder))
    problem: str | None = None
    try:
        if not _seen(folder, LOCK, seconds=_SHARED_S) or holder(folder) != owner:
            problem = "is node-local: it does not contain the files of rank 0"
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
    for host, found in gathered((socket.gethostname(), problem)):
        if found is not None:
            raise OutputError(f"output_dir: {folder} on {host} {found}; choose another output_dir")


def fills(folder: Path) -> bool:
    """Whether this rank fills a cache: rank 0, and the first of each node that does not see its files. Collective."""
    may = local_rank() == 0
    if may:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".seen-by-", dir=folder if rank() == 0 else None) as probe:
        name = from_first_rank(Path(probe.name).name)
        alone = may and (rank() == 0 or not _seen(folder, name))
        barrier()
    return alone


def check_filled(folder: Path, names: Sequence[str], what: str) -> None:
    """Raise DataError on every rank, naming the hosts whose cache has not the first rank's ``names``. Collective."""
    missing = not _seen(folder, *names)  # another node may have just written them
    found = gathered((socket.gethostname(), str(folder), missing))
    if lacking := sorted({f"{host} ({place})" for host, place, lacks in found if lacks}):
        raise DataError(
            f"{what}: the rows that {found[0][0]} prepared are not in the cache of {', '.join(lacking)}; give every "
            "node the same data files and tokenizer, and all ranks of a node the same HF_DATASETS_CACHE"
        )


def _seen(folder: Path, *names: str, seconds: float = _CACHE_S) -> bool:
    """Whether files become visible; listing the folder makes NFS query the server, unlike a lookup by name."""
    deadline = time.monotonic() + seconds
    while not {*names} <= {*(os.listdir(folder) if folder.is_dir() else ())}:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _has_checkpoints(folder: Path) -> bool:
    return bool(checkpoints(folder)) or any(folder.glob(f".{CHECKPOINT_PREFIX}*"))


def _not_empty(folder: Path, option: str = "output_dir") -> OutputError:
    return OutputError(
        f"{option}: {folder} is not empty; {_WAYS if option == 'output_dir' else 'choose another folder'}"
    )
