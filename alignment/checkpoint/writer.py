"""Write the checkpoints of a run: every rank its part, then the manifest; a rename makes the checkpoint visible.

If a checkpoint cannot be written, for example because the disk is full, existing ones are kept, training continues,
and the next save tries again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerState

from alignment.checkpoint.folder import checkpoint_folder, partial_of, prune_checkpoints, publish
from alignment.checkpoint.fragments import ExportedTensor
from alignment.checkpoint.frozen import FrozenTensors, frozen_file
from alignment.checkpoint.manifest import FileRecord, Manifest, files_in, record_of
from alignment.checkpoint.optimizer_state import write_fragments
from alignment.checkpoint.run_state import RunState
from alignment.checkpoint.saving import exported_tensors
from alignment.checkpoint.tensors import write_tensors
from alignment.config.errors import CheckpointError, one_line
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import from_first_rank, gathered, on_first_rank, together
from alignment.engines.scoring import PolicyEngine
from alignment.run.durable import replace_text, sync
from alignment.run.ranks import rank, tell, world_size

STATE = "run_state.json"


def own_state_file(rank: int) -> str:
    """Return the name of the file with one rank's part of the run state."""
    return f"run_state-{rank:05d}.json"


class TrainedEngines(Protocol):
    """The engines of a run, as far as its checkpoints need them."""

    @property
    def policy(self) -> PolicyEngine: ...
    @property
    def frozen(self) -> FrozenTensors: ...
    def exported_names(self) -> dict[str, str]: ...
    def write(self, folder: Path) -> None: ...


class CheckpointWriter:
    """Writes checkpoints of a run to its output folder.

    Args:
        args, engines, run_state: of the run.
        state: transformers' state, with the step.
        manifest: the manifest of its checkpoints, without step and files.
        write_state: writes transformers' state to a folder, on the first rank.
        hold: checks, on the first rank, that this run still owns the output folder.

    Attributes:
        failure: why the newest checkpoint could not be written, or None.
        newest: step of the newest checkpoint.
        size: its bytes, on the first rank, once this process has written one.
    """

    def __init__(
        self,
        args: AlignmentConfig,
        engines: TrainedEngines,
        run_state: RunState,
        state: TrainerState,
        manifest: Manifest,
        write_state: Callable[[Path], None],
        hold: Callable[[], None],
    ) -> None:
        self.args, self.engines, self.run_state, self.state = args, engines, run_state, state
        self.manifest = replace(manifest, resumable=not args.save_only_model)
        self.write_state, self.hold = write_state, hold
        self.folder = Path(args.output_dir or "")
        self.failure: str | None = None
        self.newest: int | None = None
        self.size = 0

    def check(self) -> None:
        """Raise CheckpointError if part of the run's state cannot be saved; collective."""
        with _together():
            if self.manifest.resumable:
                self._states({})

    def write(self, keep: Path | None) -> bool:
        """Write a checkpoint of the current step, then apply ``save_total_limit`` except to ``keep``; collective.

        Returns:
            Whether it was written. The reason for a failure is printed, and stored in ``failure``.

        Raises:
            OutputError: if this run no longer owns the folder.
        """
        on_first_rank(self.hold)
        step, self.failure = self.state.global_step, None
        target = checkpoint_folder(self.folder, step)
        try:
            self._write(target)
        except CheckpointError as error:
            self.failure = str(error)
            if rank() == 0:
                shutil.rmtree(partial_of(target), ignore_errors=True)
            tell(
                f"checkpoint-{step}: could not be written: {self.failure}; earlier checkpoints are kept, and the run "
                "continues and tries again at the next save"
            )
            return False
        self.newest = step
        self.prune(keep)
        return True

    def prune(self, keep: Path | None) -> None:
        """Remove the oldest checkpoints beyond ``save_total_limit`` except ``keep``, on the first rank."""
        try:
            if rank() == 0:
                prune_checkpoints(self.folder, self.args.save_total_limit, keep)
        except OSError as error:
            tell(f"save_total_limit: could not remove an old checkpoint: {error}")

    def finish(self, write: Callable[[], None]) -> None:
        """Write the final files of a run on the first rank; an error is stored in ``failure``. Collective."""
        try:
            with _together():
                if rank() == 0:
                    write()
        except CheckpointError as error:
            self.failure = str(error)

    def _write(self, target: Path) -> None:
        """Write all files in stages; raise CheckpointError on every rank if one of them fails."""
        partial, first, exported = partial_of(target), rank() == 0, dict[str, ExportedTensor]()
        with _together():
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        with _together():
            self.engines.write(partial)
            if first and self.manifest.resumable:  # the fragments need not repeat weights that are there in fp32
                exported = exported_tensors(partial, self.engines.exported_names())
        exported = from_first_rank(exported)
        with _together():
            records = self._write_own(partial, exported) if self.manifest.resumable else {}
        everyone = {name: one for part in gathered(records) for name, one in part.items()}
        with _together():
            if first:
                self.write_state(partial)
                for name in files_in(partial):
                    if name not in everyone:
                        sync(partial / name)
                        everyone[name] = record_of(partial / name)
                replace(self.manifest, step=self.state.global_step, files=everyone).write(partial)
                publish(partial, target)
                self.size = sum(record.size for record in everyone.values())

    def _states(self, exported: dict[str, ExportedTensor]) -> dict[str, str]:
        """Return the files of the run state that this rank writes, by name."""
        shared, own = self.run_state.state()
        files = {STATE: {**shared, "exported": exported}, own_state_file(rank()): own}
        texts = {name: _json(state) for name, state in files.items()}
        return {name: text for name, text in texts.items() if rank() == 0 or name != STATE}

    def _write_own(self, partial: Path, exported: dict[str, ExportedTensor]) -> dict[str, FileRecord]:
        """Write this rank's files; return their sizes and checksums by name."""
        records = write_fragments(self.engines.policy, partial, exported)
        if changed := self.engines.frozen.changed:
            name = frozen_file(rank(), world_size())
            records[name] = write_tensors(partial / name, changed, {"format": "pt"})
        for name, text in self._states(exported).items():
            replace_text(partial / name, text)
            records[name] = record_of(partial / name)
        return records


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Run a stage of writing: it succeeds on all ranks, or all raise CheckpointError. Collective."""
    with together():
        try:
            yield
        except OSError as error:
            raise CheckpointError(one_line(error)) from error


def _json(state: dict[str, Any]) -> str:
    """Serialize the run state as JSON, NumPy scalars as numbers; raise CheckpointError if it holds anything else."""
    try:
        return json.dumps(state, default=lambda value: value.item())
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the run, which includes that of callbacks, cannot be saved: {one_line(error)}; use only "
            "numbers, strings, lists and dicts in it, or set save_only_model: true"
        ) from error
