"""A run's hold on its output folder: it checks it, takes it, makes it ready, and lets go of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from alignment.config.errors import OptionError, OutputError, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.checkpoints.folder import checkpoint_step, checkpoints, clear_leftovers
from alignment.engines.checkpoints.lock import OutputLock
from alignment.engines.checkpoints.old_runs import set_aside
from alignment.engines.checkpoints.probe import PROBE, check_shared_folder
from alignment.engines.collectives import on_first_rank
from alignment.engines.launch_env import rank
from alignment.engines.watch.requests import STOP_FILE
from alignment.reporting.activity import ACTIVITY
from alignment.reporting.status_file import STATUS, read_status
from alignment.training.checkpointing.output_folder import COMPLETIONS, LOG, check_output_folder, holds_run, in_use
from alignment.training.checkpointing.present import Present
from alignment.training.checkpointing.resume import Checkpoint, check_same_run, choose, find


class RunFolder:
    """The output folder of a run.

    Args:
        path: the folder, which need not exist.
        args: the run's options.
        tell: prints a line on the first rank.

    Attributes:
        held_by_earlier_run: the folder holds another run's results, on the first rank, and is not this one's yet.
    """

    def __init__(self, path: Path, args: AlignmentConfig, tell: Callable[[str], None]) -> None:
        self.path, self.args, self.tell = path, args, tell
        self.lock = OutputLock(path, tell=tell)
        self._free = False
        self._made: list[Path] = []
        self._entered = False
        self.held_by_earlier_run = False

    def check(self) -> None:
        """Refuse on the first rank, before anything is read, a folder that the run will not be able to use.

        Raises:
            OutputError: another run has it, it cannot be written, or it holds something else.
            CheckpointError: there is no checkpoint to go on from.
        """
        if rank() != 0:
            return
        args, asked = self.args, self.args.resume_from_checkpoint
        if asked:
            find(self.path, asked, args.method)
        else:  # a script may still ask for a resume when it calls train()
            check_output_folder(self.path, args.overwrite_output_dir, earlier_run=True, files=True)
            self._free = not in_use(self.path)
            self.held_by_earlier_run = holds_run(self.path) and not args.overwrite_output_dir
        if not args.dry_run:  # which writes nothing there, and may come before the run that has the folder ends
            self.lock.peek()
        if args.merged_output_dir is not None:
            from alignment.engines.exporting.folder import REPORT  # imports more than a run without it needs

            merged = Path(args.merged_output_dir)
            # What an attempt before this one merged, if it came so far, is set aside when it is merged again.
            if not asked or not (merged / REPORT).exists():
                check_output_folder(merged, False, "merged_output_dir")

    def check_not_replaced(self, folder: Path) -> None:
        """Refuse to write a model that was not trained here over one that was, on the first rank.

        Raises:
            OutputError: ``folder`` is the output folder, and an earlier run's.
        """
        if self.held_by_earlier_run and folder.resolve() == self.path.resolve():
            raise OutputError(
                f"output_dir: {self.path} holds an earlier run, and its model would be replaced by one that was not "
                "trained since; name another folder, or set overwrite_output_dir: true"
            )

    def enter(self, asked: str | bool | None, present: Present) -> Checkpoint | None:
        """Take the folder and make it ready for the run to begin, or to go on from a checkpoint. Collective.

        Args:
            asked: ``latest`` or True, or a folder; None or False: the run begins.
            present: what the run is now.

        Returns:
            The checkpoint to go on from; None: the run begins.

        Raises:
            OptionError: the checkpoint is of a run with other numbers.
            CheckpointError: there is none to go on from.
            OutputError: the folder cannot be used.
        """
        args = self.args
        if asked and args.overwrite_output_dir:  # an argument of train() is seen by no earlier check
            raise OptionError(f"{setting('resume_from_checkpoint', asked)}: set overwrite_output_dir: false with it")
        again = self._entered  # this trainer's own earlier run is moved aside
        if not asked and not again:
            # A log that is there although the folder was free is this trainer's: it may have evaluated.
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
        """Called when a run has been restored: checkpoints of later steps are moved away. Collective."""
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
        """Clear away what a killed process left, and what would be taken for this run's."""
        clear_leftovers(self.path)
        for probe in self.path.glob(f"{PROBE}*"):
            probe.unlink(missing_ok=True)
        self._clear_stop_file()
        if (self.path / STATUS).is_dir():
            raise OutputError(
                f"output_dir: {self.path / STATUS} is a folder, in the place of the run's status; remove it"
            )
        replaces = self.args.overwrite_output_dir or self._entered or (self.held_by_earlier_run and not resumes)
        if checkpoint is None and replaces:
            place = set_aside(self.path)
            if place is not None:
                why = "overwrite_output_dir" if self.args.overwrite_output_dir else "output_dir"
                self.tell(
                    f"{'train' if self._entered else why}: checkpoints and logs of the earlier run are in {place}"
                )
            return
        if checkpoint is None and resumes:
            self.tell(f"resume_from_checkpoint: {self.path} has no checkpoint, so the run begins")
            for name in (LOG, COMPLETIONS):  # of an attempt that came to none
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(self.path / name, 0)

    def _clear_stop_file(self) -> None:
        """One from before this start was meant for the run before; but a job that SLURM starts again is that run."""
        path = self.path / STOP_FILE
        if _is_requeued(self.path) and path.exists():
            self.tell(
                f"{path}: asks this run, which SLURM has started again, to stop; remove it before the next start"
            )
            return
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            reason = error.strerror or error
            raise OutputError(f"{path}: cannot be removed ({reason}), and would stop the run; remove it") from error
        self.tell(f"{path}: left over from an earlier run, removed; create it again to stop this one")

    def _leave_newer(self, checkpoint: Checkpoint) -> None:
        """Damaged ones among them: the run will write those steps again."""
        newer = [path for path in checkpoints(self.path) if (checkpoint_step(path) or 0) > checkpoint.step]
        if newer:
            place = set_aside(self.path, newer)
            names = ", ".join(path.name for path in newer)
            self.tell(f"resume_from_checkpoint: {names} of later steps moved to {place}")

    def release(self) -> None:
        """Let the next run have it; a folder that was made for this one disappears if nothing was written."""
        self._entered = False
        self.lock.release()
        with contextlib.suppress(OSError):  # it has content
            for path in self._made:
                path.rmdir()


def _is_requeued(folder: Path) -> bool:
    """Whether the run in ``folder`` belongs to this job of SLURM, which has started it again."""
    job = os.environ.get("SLURM_JOB_ID", "")
    try:
        status = read_status(folder) if job and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else None
    except (ValueError, OSError):
        return False
    return status is not None and status.job == job
