"""Write the checkpoints of a run: every rank its part, then the manifest; a rename makes the checkpoint visible.

If a checkpoint cannot be written, for example because the disk is full, existing ones are kept, training continues,
and the next save tries again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from alignment.checkpoint.folder import checkpoint_folder, partial_of, prune_checkpoints, publish
from alignment.checkpoint.fragments import fragment_file
from alignment.checkpoint.frozen import frozen_bytes, frozen_file, write_frozen
from alignment.checkpoint.manifest import FileRecord, Manifest, files_in, record_of
from alignment.checkpoint.optimizer_state import (
    ExportedTensor,
    fragment_bytes,
    fragment_ranks,
    write_fragments,
    writes_fragments,
)
from alignment.checkpoint.saving import exported_tensors
from alignment.config.errors import CheckpointError, OutputError, one_line
from alignment.engines.collectives import from_first_rank, gathered, on_first_rank, together
from alignment.reporting.durable import replace_text, sync
from alignment.run.ranks import rank, world_size
from alignment.training.checkpointing.present import Present
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines
from alignment.training.run_state import Identity

STATE = "run_state.json"
_LIBRARIES = ("deepspeed-alignment", "torch", "transformers", "deepspeed", "peft", "bitsandbytes")
_SPARE = 1 << 20  # bytes for the tokenizer, configurations and states


def own_state_file(rank: int) -> str:
    """Return the name of the file with one rank's part of the run state."""
    return f"run_state-{rank:05d}.json"


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Run a stage of writing: it succeeds on all ranks, or all raise :class:`CheckpointError`. Collective."""
    with together():
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(_reason(error)) from error


class CheckpointWriter:
    """Writes checkpoints to the output folder.

    Args:
        context: the run.
        engines: its engines.
        identity: identifies the run.
        present: properties of the run, for the manifest.
        write_state: writes transformers' state to a folder, on the first rank.
        hold: checks that this run still owns the output folder; called on the first rank.

    Attributes:
        failure: why the newest checkpoint could not be written, or None.
        newest: step of the newest checkpoint.
    """

    def __init__(
        self,
        context: RunContext,
        engines: RunEngines,
        identity: Identity,
        present: Present,
        write_state: Callable[[Path], None],
        hold: Callable[[], None],
    ) -> None:
        self.context, self.engines, self.identity = context, engines, identity
        self.present = present
        self.write_state, self.hold = write_state, hold
        self.resumable = not context.args.save_only_model
        self.failure: str | None = None
        self.newest: int | None = None

    def describe(self) -> str:
        """Return the total size of a checkpoint over all ranks; collective.

        Raises:
            CheckpointError: if part of the run's state cannot be saved.
        """
        with together():
            if self.resumable:
                self._state_texts()
            own = self._own_bytes()
        model, state = self._bytes(own)
        if not self.resumable:
            return f"checkpoints: {_size(model)} each, model only (save_only_model): they cannot be resumed from"
        return f"checkpoints: {_size(model + state)} each: model {_size(model)}, state {_size(state)}"

    def _bytes(self, own: int) -> tuple[int, int]:
        """Return the bytes of the model, and of everything else on all ranks."""
        return self.engines.trained_bytes(), sum(gathered(own))

    def _own_bytes(self) -> int:
        """Return the bytes that this rank writes in addition to the model."""
        if not self.resumable:
            return 0
        policy = self.engines.policy
        # fp32 weights are stored in the model's files; renaming them takes slightly more.
        exported = self.engines.exported_names() if self.engines.trains_fp32 else ()
        return fragment_bytes(policy, exported) + frozen_bytes(self.engines.frozen)

    def _state_texts(self) -> tuple[str, str]:
        """Return the run state shared by all ranks, and this rank's own, as JSON."""
        state = self.context.run_state.state_dict()
        return _json(state["shared"]), _json(state["own"])

    def write(self, keep: Path | None) -> bool:
        """Write a checkpoint of the current step, then apply ``save_total_limit``; collective.

        Args:
            keep: a checkpoint that must not be removed.

        Returns:
            Whether it was written. The reason for a failure is printed, and stored in ``failure``.

        Raises:
            OutputError: if this run no longer owns the folder.
        """
        step = self.context.state.global_step
        target = checkpoint_folder(self.context.output_dir, step)
        if self.newest == step:
            return True
        on_first_rank(self.hold)
        self.failure = None
        with self.context.phases("save"), self._kept_as_failure():
            self._written(target)
        if self.failure is not None:
            if self.context.is_first:
                shutil.rmtree(partial_of(target), ignore_errors=True)
            self.context.tell(
                f"checkpoint-{step}: could not be written: {self.failure}; earlier checkpoints are kept, and the run "
                "continues and tries again at the next save"
            )
            return False
        self.newest = step
        self.prune(keep)
        return True

    def prune(self, keep: Path | None) -> None:
        """Remove the oldest checkpoints beyond ``save_total_limit`` except ``keep``, on the first rank."""
        if not self.context.is_first:
            return
        try:
            prune_checkpoints(self.context.output_dir, self.context.args.save_total_limit, keep)
        except OSError as error:
            self.context.tell(f"save_total_limit: could not remove an old checkpoint: {_reason(error)}")

    def _written(self, target: Path) -> None:
        """Write all files in stages.

        Raises:
            CheckpointError: on every rank, if one of them fails.
        """
        partial = partial_of(target)
        with _together():
            own = self._own_bytes()
        size = sum(self._bytes(own))
        with _together():
            self._prepare(partial, size)
        with _together():
            self.engines.write(partial)
        with _together():
            exported = self._exported(partial)
        exported = from_first_rank(exported)
        with _together():
            records = self._own_files(partial, exported)
        everyone = {name: one for part in gathered(records) for name, one in part.items()}
        with _together():
            self._publish(partial, target, everyone)

    def finish(self, write: Callable[[], None]) -> None:
        """Write the final files of a run on the first rank; an error is stored in ``failure``. Collective."""
        with self._kept_as_failure(), _together():
            if self.context.is_first:
                write()

    @contextlib.contextmanager
    def _kept_as_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.failure = str(error)

    def _prepare(self, partial: Path, size: int) -> None:
        if not self.context.is_first:
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < size + _SPARE:
            raise OutputError(
                f"requires {_size(size + _SPARE)}, but {partial.parent} has only {_size(free)} of free space"
            )

    def _exported(self, partial: Path) -> dict[str, ExportedTensor]:
        """Locate trained fp32 weights in the model's own files; the first rank looks."""
        names = self.engines.exported_names() if self.resumable else {}
        found = exported_tensors(partial, names) if self.context.is_first else {}
        return {name: ExportedTensor(*place) for name, place in found.items()}

    def _own_files(self, partial: Path, exported: Mapping[str, ExportedTensor]) -> dict[str, FileRecord]:
        """Write this rank's files; return their sizes and checksums by name."""
        if not self.resumable:
            return {}
        records = {}
        policy, frozen = self.engines.policy, self.engines.frozen
        if writes_fragments(policy):
            name = fragment_file(rank(), fragment_ranks(policy))
            records[name] = write_fragments(policy, partial / name, exported)
        if frozen.changed:
            name = frozen_file(rank(), world_size())
            records[name] = write_frozen(frozen, partial / name)
        shared, mine = self._state_texts()
        records |= _text_file(partial / own_state_file(rank()), mine)
        if self.context.is_first:
            places = json.dumps({"exported": dict(exported)})
            records |= _text_file(partial / STATE, f"{shared[:-1]}, {places[1:]}")
        return records

    def _publish(self, partial: Path, target: Path, records: dict[str, FileRecord]) -> None:
        """On the first rank: record the files without records, write the manifest, and rename the folder."""
        if not self.context.is_first:
            return
        self.write_state(partial)
        for name in files_in(partial):
            if name not in records:
                sync(partial / name)
                records[name] = record_of(partial / name)
        Manifest(
            run=self.identity.name,
            step=self.context.state.global_step,
            method=self.context.args.method,
            world_size=world_size(),
            stage=self.engines.stage,
            window=self.present.window,
            total_steps=self.present.total_steps,
            resumable=self.resumable,
            versions=library_versions(),
            fingerprints=dict(self.present.fingerprints),
            options=dict(self.present.options),
            files=records,
        ).write(partial)
        publish(partial, target)


def library_versions() -> dict[str, str]:
    """Return the versions of the relevant libraries by name."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):  # an optional library, or a checkout without installation
            found[name] = version(name)
    return found


def _text_file(path: Path, text: str) -> dict[str, FileRecord]:
    replace_text(path, text)
    return {path.name: record_of(path)}


def _json(parts: Mapping[str, Any]) -> str:
    """Serialize parts of the run state as JSON, NumPy scalars as numbers.

    Raises:
        CheckpointError: if a part holds anything else; names the part.
    """
    texts = []
    for name, state in parts.items():
        try:
            texts.append(f"{json.dumps(name)}: {json.dumps(state, default=_number)}")
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {name!r} (of callbacks: 'trainer') cannot be saved: {one_line(error)}; use only "
                "numbers, strings, lists and dicts in it, or set save_only_model: true"
            ) from error
    return f"{{{', '.join(texts)}}}"


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"unsupported type {type(value).__name__}")


def _size(count: float) -> str:
    """Format bytes in the largest unit that gives at least 1."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return one_line(error)
