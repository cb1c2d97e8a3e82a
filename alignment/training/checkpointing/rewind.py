"""Return to the last checkpoint within a process, and continue from it as after a restart."""

from __future__ import annotations

from pathlib import Path

from alignment.checkpoint.run_folder import RunFolder
from alignment.config.errors import OutputError, one_line
from alignment.run.activity import ACTIVITY
from alignment.training.checkpointing.amendments import amend
from alignment.training.checkpointing.best import BestModel
from alignment.training.checkpointing.present import Present
from alignment.training.checkpointing.restore import restore
from alignment.training.checkpointing.resume import LATEST, choose
from alignment.training.checkpointing.writer import CheckpointWriter
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines


class Rewinder:
    """Restores weights, optimizer and run state from the newest complete checkpoint; called between two steps.

    Args:
        context: the run.
        engines: its engines, which hold no gradient.
        present: properties of the current run.
        folder: its output folder.
        writer: the writer of its checkpoints, which also knows the one that the run was resumed from.
    """

    def __init__(
        self, context: RunContext, engines: RunEngines, present: Present, folder: RunFolder, writer: CheckpointWriter
    ) -> None:
        self.context, self.engines, self.present = context, engines, present
        self.folder, self.writer = folder, writer
        self._at: Path | None = None

    def __call__(self) -> str | None:
        """Return to a checkpoint; return its name, or None if the run has none. Collective.

        Raises:
            CheckpointError: if there are checkpoints but all are damaged.
        """
        context, identity = self.context, self.writer.identity
        if self.writer.newest is None:
            return None
        with ACTIVITY("rewind"):
            checkpoint = choose(context.output_dir, LATEST, context.args.method, lambda _: None, context.tell)
            if checkpoint is None:
                return None
            # These two keep counting: it is the same attempt, and repeated steps count.
            attempt, retried = identity.attempt, context.retries.count
            restore(checkpoint, context, self.engines, self.present)
            identity.attempt, context.retries.count = attempt, retried
            context.tell(BestModel(context.args, context.state).moved_to(context.output_dir))
            self.folder.set_newer_aside(checkpoint.step)
        self.writer.newest, self._at = checkpoint.step, checkpoint.folder
        return checkpoint.folder.name

    def amend(self) -> None:
        """Record the decision about the bad step in that checkpoint, on the first rank."""
        if self._at is None or not self.context.is_first:
            return
        try:
            amend(self._at, self.context.run_state)
        except (OSError, OutputError) as error:
            self.context.tell(
                f"{self._at}: could not record which windows are skipped ({one_line(error)}); if the run is killed "
                "before its next checkpoint, a resumed run trains on them"
            )
