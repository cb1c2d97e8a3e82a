"""Writes the checkpoints of a run: every rank its part, then the manifest, then one rename that makes them visible.

A checkpoint that cannot be written, because a disk is full, say, costs nothing but itself: those that there are stay,
the run goes on, and the next one is tried again.
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

from alignment.config.errors import CheckpointError, OutputError, one_line
from alignment.engines.checkpoints.folder import checkpoint_folder, partial_of, prune_checkpoints, publish
from alignment.engines.checkpoints.fragments import fragment_file
from alignment.engines.checkpoints.frozen import frozen_bytes, frozen_file, write_frozen
from alignment.engines.checkpoints.manifest import Manifest, files_in
from alignment.engines.checkpoints.optimizer_state import (
    ExportedTensor,
    fragment_bytes,
    fragment_ranks,
    write_fragments,
    writes_fragments,
)
from alignment.engines.checkpoints.records import FileRecord, record_of
from alignment.engines.collectives import from_first_rank, gathered, on_first_rank, together
from alignment.engines.launch_env import rank, world_size
from alignment.engines.saving import exported_tensors
from alignment.reporting.durable import replace_text, sync
from alignment.training.checkpointing.present import Present
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines
from alignment.training.run_state import Identity

STATE = "run_state.json"
_LIBRARIES = ("deepspeed-alignment", "torch", "transformers", "deepspeed", "peft", "bitsandbytes")
_SPARE = 1 << 20  # bytes, for the tokenizer, configurations and states


def own_state_file(rank: int) -> str:
    """The file with what the run state holds of one rank."""
    return f"run_state-{rank:05d}.json"


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """A stage of writing: all ranks get through it, or each of them raises :class:`CheckpointError`. Collective."""
    with together():
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(_reason(error)) from error


class CheckpointWriter:
    """Writes checkpoints into the output folder.

    Args:
        context: the run.
        engines: its engines, once they are built.
        identity: which run it is.
        present: what its numbers come from, for the manifest.
        write_state: writes transformers' state into a folder, on the first rank.
        hold: makes sure that the output folder is still this run's; called on the first rank.

    Attributes:
        failure: why the newest checkpoint could not be written; None where it was.
        newest: the step of the newest one.
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
        """How large a checkpoint is, of all ranks together; collective.

        Raises:
            CheckpointError: something of the run cannot be saved, so that none could be written.
        """
        with together():
            if self.resumable:
                self._state_texts()
            own = self._own_bytes()
        model, state = self._bytes(own)
        if not self.resumable:
            return f"checkpoints: {_size(model)} each, the model only, so no run can go on from them (save_only_model)"
        return f"checkpoints: {_size(model + state)} each: model {_size(model)}, state {_size(state)}"

    def _bytes(self, own: int) -> tuple[int, int]:
        """Of the model, and of everything beside it on all ranks."""
        return self.engines.trained_bytes(), sum(gathered(own))

    def _own_bytes(self) -> int:
        """Of what this rank writes beside the model."""
        if not self.resumable:
            return 0
        policy = self.engines.policy
        # Those that train in fp32 are expected in the model's files; where they are renamed, it takes a little more.
        exported = self.engines.exported_names() if self.engines.trains_fp32 else ()
        return fragment_bytes(policy, exported) + frozen_bytes(self.engines.frozen)

    def _state_texts(self) -> tuple[str, str]:
        """What all ranks share of the run state, and what is this rank's own, as JSON."""
        state = self.context.run_state.state_dict()
        return _json(state["shared"]), _json(state["own"])

    def write(self, keep: Path | None) -> bool:
        """Write the checkpoint of the present step, then remove those beyond ``save_total_limit``; collective.

        Args:
            keep: a checkpoint that is not to be removed.

        Returns:
            Whether it is there. Why it could not be written was told, and is in ``failure``.

        Raises:
            OutputError: the folder is no longer this run's.
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
                f"checkpoint-{step}: not written, {self.failure}; those from before are kept, and the run goes on and "
                "tries again at the next save"
            )
            return False
        self.newest = step
        self.prune(keep)
        return True

    def prune(self, keep: Path | None) -> None:
        """Remove the oldest checkpoints beyond ``save_total_limit``, but not ``keep``, on the first rank."""
        if not self.context.is_first:
            return
        try:
            prune_checkpoints(self.context.output_dir, self.context.args.save_total_limit, keep)
        except OSError as error:
            self.context.tell(f"save_total_limit: an old checkpoint could not be removed: {_reason(error)}")

    def _written(self, target: Path) -> None:
        """Write everything, stage by stage.

        Raises:
            CheckpointError: on every rank, where one of them could not.
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
        """Write what a run ends with, on the first rank; if that fails it is kept in ``failure``. Collective."""
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
            raise OutputError(f"it takes {_size(size + _SPARE)}, and {_size(free)} are free in {partial.parent}")

    def _exported(self, partial: Path) -> dict[str, ExportedTensor]:
        """Where the model's own files have the weights that train in fp32 already; the first rank looks."""
        names = self.engines.exported_names() if self.resumable else {}
        found = exported_tensors(partial, names) if self.context.is_first else {}
        return {name: ExportedTensor(*place) for name, place in found.items()}

    def _own_files(self, partial: Path, exported: Mapping[str, ExportedTensor]) -> dict[str, FileRecord]:
        """Write what this rank holds; sizes and checksums by name."""
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
        """On the first rank: record the files that others have not, write the manifest, and rename."""
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
    """The versions of what computes, by name."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):  # an optional one, or a checkout that was not installed
            found[name] = version(name)
    return found


def _text_file(path: Path, text: str) -> dict[str, FileRecord]:
    replace_text(path, text)
    return {path.name: record_of(path)}


def _json(parts: Mapping[str, Any]) -> str:
    """Parts of the run state as JSON, numbers of NumPy as numbers.

    Raises:
        CheckpointError: one holds something else; it is named.
    """
    texts = []
    for name, state in parts.items():
        try:
            texts.append(f"{json.dumps(name)}: {json.dumps(state, default=_number)}")
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {name!r} (of callbacks: 'trainer') cannot be saved: {one_line(error)}; keep numbers, "
                "texts, lists and mappings of these in it, or set save_only_model: true"
            ) from error
    return f"{{{', '.join(texts)}}}"


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"of type {type(value).__name__}")


def _size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return one_line(error)
