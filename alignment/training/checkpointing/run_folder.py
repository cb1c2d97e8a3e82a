"""Check, lock, prepare and release the output folder of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from alignment.checkpoint.folder import checkpoint_step, checkpoints, clear_leftovers
from alignment.checkpoint.lock import OutputLock
from alignment.checkpoint.old_runs import set_aside
from alignment.checkpoint.probe import PROBE, check_shared_folder
from alignment.config.errors import OptionError, OutputError, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import on_first_rank
from alignment.engines.launch_env import rank
from alignment.reporting.status_file import STATUS, read_status
from alignment.run.activity import ACTIVITY
from alignment.run.requests import STOP_FILE
from alignment.training.checkpointing.output_folder import (
    COMPLETIONS,
    LOG,
    check_inputs_stay,
    check_output_folder,
    holds_run,
    in_use,
)
from alignment.training.checkpointing.present import Present
from alignment.training.checkpointing.resume import Checkpoint, check_same_run, choose, find


class RunFolder:
    """The output folder of a run.

    Args:
        path: the folder, which need not exist.
        args: the run's options.
        tell: prints a line on the first rank.

    Attributes:
        held_by_earlier_run: on the first rank, whether the folder still has the results of another run.
    """

    def __init__(self, path: Path, args: AlignmentConfig, tell: Callable[[str], None]) -> None:
        self.path, self.args, self.tell = path, args, tell
        self.lock = OutputLock(path, tell=tell)
        self._free = False
        self._made: list[Path] = []
        self._entered = False
        self.held_by_earlier_run = False

    def check(self, inputs: Iterable[tuple[str, str]] = ()) -> None:
        """Refuse a folder that the run cannot use, on the first rank, before anything is read.

        Args:
            inputs: options and paths or Hub names of the models and data that the run reads.

        Raises:
            OutputError: if another run uses it, it cannot be written, or it contains something else or an input.
            CheckpointError: if there is no checkpoint to resume from.
        """
        if rank() != 0:
            return
        args, asked = self.args, self.args.resume_from_checkpoint
        if asked:
            find(self.path, asked, args.method)
        else:  # a script may still resume by an argument of train()
            check_inputs_stay(self.path, inputs)
            check_output_folder(self.path, args.overwrite_output_dir, earlier_run=True, files=True)
            self._free = not in_use(self.path)
            self.held_by_earlier_run = holds_run(self.path) and not args.overwrite_output_dir
        if not args.dry_run:  # it writes nothing, and may start before the folder's current run ends
            self.lock.peek()
        if args.merged_output_dir is not None:
            from alignment.checkpoint.export import REPORT  # imported only if needed

            merged = Path(args.merged_output_dir)
            # A merged model of an earlier attempt is moved aside when merging again.
            if not asked or not (merged / REPORT).exists():
                check_output_folder(merged, False, "merged_output_dir")

    def check_not_replaced(self, folder: Path) -> None:
        """Refuse, on the first rank, to replace an earlier run's model by one that was not trained here.

        Raises:
            OutputError: if ``folder`` is the output folder and has an earlier run.
        """
        if self.held_by_earlier_run and folder.resolve() == self.path.resolve():
            raise OutputError(
                f"output_dir: {self.path} contains an earlier run, whose model would be replaced by one that has not "
                "been trained; choose another folder, or set overwrite_output_dir: true"
            )

    def enter(self, asked: str | bool | None, present: Present) -> Checkpoint | None:
        """Lock the folder and prepare it for a new run or for a resume. Collective.

        Args:
            asked: ``latest`` or True, or a folder; None or False starts a new run.
            present: properties of the current run.

        Returns:
            The checkpoint to resume from; None for a new run.

        Raises:
            OptionError: if the checkpoint was written with different settings.
            CheckpointError: if there is no checkpoint to resume from.
            OutputError: if the folder cannot be used.
        """
        args = self.args
        if asked and args.overwrite_output_dir:  # no earlier check sees an argument of train()
            raise OptionError(
                f"{setting('resume_from_checkpoint', asked)}: cannot be combined with overwrite_output_dir; set it to "
                "false"
            )
        again = self._entered  # this trainer's own earlier run is moved aside
        if not asked and not again:
            # If the folder was empty but has a log, this trainer wrote it: it may have evaluated.
            own = (LOG, COMPLETIONS) if self._free else ()
            on_first_rank(lambda: check_output_folder(self.path, args.overwrite_output_dir, files=True, ignored=own))
        if not again:
            on_first_rank(self._take)
        try:
            check_shared_folder(self.path)
            checkpoint = self._chosen(asked, present)
            on_first_rank(lambda: self._prepare(checkpoint, bool(asked)))
            ACTIVITY.folder = self.path
        except BaseException:
            self.release()
            raise
        self.held_by_earlier_run, self._entered = False, True
        return checkpoint

    def went_on(self, checkpoint: Checkpoint) -> None:
        """Move checkpoints of later steps away; called after a run was restored. Collective."""
        on_first_rank(lambda: self._leave_newer(checkpoint))

    def _take(self) -> None:
        self._made = [path for path in (self.path, *self.path.absolute().parents) if not path.exists()]
        self.lock.acquire()

    def _chosen(self, asked: str | bool | None, present: Present) -> Checkpoint | None:
        if not asked:
            return None
        return choose(
            self.path,
            asked,
            present.method,
            lambda checkpoint: check_same_run(checkpoint, present, anyway=self.args.resume_anyway, tell=self.tell),
            self.tell,
        )

    def _prepare(self, checkpoint: Checkpoint | None, resumes: bool) -> None:
        """Remove what a killed process left and what could be mistaken for this run's files."""
        clear_leftovers(self.path)
        for probe in self.path.glob(f"{PROBE}*"):
            probe.unlink(missing_ok=True)
        self._clear_stop_file()
        if (self.path / STATUS).is_dir():
            raise OutputError(f"output_dir: {self.path / STATUS} must be a file, but is a folder; remove it")
        replaces = self.args.overwrite_output_dir or self._entered or (self.held_by_earlier_run and not resumes)
        if checkpoint is None and replaces:
            place = set_aside(self.path)
            if place is not None:
                why = "overwrite_output_dir" if self.args.overwrite_output_dir else "output_dir"
                self.tell(f"{'train' if self._entered else why}: moved the files of the earlier run to {place}")
            return
        if checkpoint is None and resumes:
            self.tell(f"resume_from_checkpoint: no checkpoint in {self.path}; starting a new run")
            for name in (LOG, COMPLETIONS):  # of an attempt that saved no checkpoint
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(self.path / name, 0)

    def _clear_stop_file(self) -> None:
        """Remove a stop file of an earlier run, except in a job requeued by SLURM, which is still the same run."""
        path = self.path / STOP_FILE
        if _is_requeued(self.path) and path.exists():
            self.tell(f"{path}: asks this run, which SLURM has requeued, to stop; remove it before the next start")
            return
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            reason = error.strerror or error
            raise OutputError(
                f"{path}: would stop the run and cannot be removed ({reason}); remove it manually"
            ) from error
        self.tell(f"{path}: removed, since it is from an earlier run; create it again to stop this one")

    def _leave_newer(self, checkpoint: Checkpoint) -> None:
        """Move checkpoints of later steps away, damaged ones included; the run will write these steps again."""
        newer = [path for path in checkpoints(self.path) if (checkpoint_step(path) or 0) > checkpoint.step]
        if newer:
            place = set_aside(self.path, newer)
            names = ", ".join(path.name for path in newer)
            self.tell(f"resume_from_checkpoint: moved {names} of later steps to {place}")

    def release(self) -> None:
        """Release the lock; a folder created for this run is removed if it is empty."""
        self._entered = False
        self.lock.release()
        with contextlib.suppress(OSError):  # it is not empty
            for path in self._made:
                path.rmdir()


def _is_requeued(folder: Path) -> bool:
    """Whether the run in ``folder`` belongs to this SLURM job, which was requeued."""
    job = os.environ.get("SLURM_JOB_ID", "")
    try:
        status = read_status(folder) if job and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else None
    except (ValueError, OSError):
        return False
    return status is not None and status.job == job
