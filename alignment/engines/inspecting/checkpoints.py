"""The checkpoints of a run on disk, and whether they are complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.checkpoint.folder import checkpoint_step, checkpoints, partial_of
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.config.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint.

    Attributes:
        name: of its folder.
        step: from its name.
        problem: why it is incomplete; None if it is complete.
        bytes: total size of its files; 0 if unknown.
        resumable: whether a run can resume from it.
        total_steps: of the run when the checkpoint was written; 0 if unknown.
        run: name of the run that wrote it.
    """

    name: str
    step: int
    problem: str | None = None
    bytes: int = 0
    resumable: bool = False
    total_steps: int = field(default=0, repr=False)
    run: str = field(default="", repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint as a JSON object."""
        return {
            "name": self.name,
            "step": self.step,
            "complete": self.problem is None,
            "problem": self.problem,
            "bytes": self.bytes,
            "resumable": self.resumable,
        }


class CheckpointReader:
    """Reads the checkpoints of a folder; each manifest is read once.

    Args:
        folder: the output folder.
        read_all: also compare the contents of every file with its checksum, once.
    """

    def __init__(self, folder: Path, *, read_all: bool = False) -> None:
        self.folder, self._read_all = folder, read_all
        self._known: dict[tuple[str, int], Manifest] = {}
        self._compared: set[tuple[str, int]] = set()

    def views(self) -> list[CheckpointView]:
        """All checkpoints, the newest first."""
        found = [(folder, self._view(folder)) for folder in reversed(checkpoints(self.folder))]
        return [view for folder, view in found if view.problem is None or folder.is_dir()]  # or removed meanwhile

    def being_written(self) -> list[str]:
        """Names of checkpoints that are being written, or were when their process was killed."""
        return sorted(path.name for path in self.folder.glob(partial_of(self.folder / "checkpoint-*").name))

    def _view(self, folder: Path) -> CheckpointView:
        step = checkpoint_step(folder) or 0
        try:
            manifest = self._manifest(folder)
            self._check(folder, manifest)
        except (CheckpointError, OSError) as error:
            return CheckpointView(folder.name, step, _without_folder(str(error), folder))
        size = sum(record.size for record in manifest.files.values())
        return CheckpointView(
            folder.name, step, None, size, manifest.resumable, manifest.total_steps, run=manifest.run
        )

    def _manifest(self, folder: Path) -> Manifest:
        key = self._key(folder)
        if key not in self._known:
            self._known[key] = Manifest.read(folder)
        return self._known[key]

    def _check(self, folder: Path, manifest: Manifest) -> None:
        manifest.check_files(folder)
        if self._read_all and self._key(folder) not in self._compared:
            manifest.check_contents(folder, sorted(manifest.files))
            self._compared.add(self._key(folder))

    def _key(self, folder: Path) -> tuple[str, int]:
        try:
            return folder.name, (folder / MANIFEST).stat().st_mtime_ns
        except OSError:
            return folder.name, 0


def _without_folder(message: str, folder: Path) -> str:
    """The message without the folder's path, since the checkpoint's name precedes it."""
    return message.removeprefix(f"{folder}/").removeprefix(f"{folder}: ")
