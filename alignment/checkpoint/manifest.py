"""The manifest of a checkpoint: the size and checksum of every file, and the run that wrote them.

It is written last. A checkpoint is complete if and only if its manifest exists and matches its files. Importable
without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from alignment.config.errors import CheckpointError
from alignment.run.durable import replace_text

MANIFEST = "manifest.json"
FORMAT = 1


class FileRecord(NamedTuple):
    """The manifest's record of a file: its size in bytes, and the xxh3_128 of its content in hexadecimal digits."""

    size: int
    checksum: str


def record_of(path: Path) -> FileRecord:
    """Compute size and checksum of a file, in chunks; raise CheckpointError if it cannot be read."""
    digest, size = xxhash.xxh3_128(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(4 * 2**20):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; restore the file") from error
    return FileRecord(size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    run: str  #: name of the run, shared by its attempts
    step: int  #: number of completed optimizer steps
    method: str  #: alignment method
    world_size: int  #: number of ranks that wrote it
    stage: int  #: ZeRO stage
    window: int  #: rows per optimizer step
    total_steps: int  #: number of steps of the run
    resumable: bool  #: whether it contains more than the model
    versions: dict[str, str]  #: of libraries, by name
    fingerprints: dict[str, Any]  #: of data, models and reward sources
    options: dict[str, Any]  #: resolved
    files: dict[str, FileRecord]  #: size and checksum of every file, by its path in the folder
    format: int = FORMAT  #: version of this format

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder``, after all files that it lists."""
        files = {name: record._asdict() for name, record in self.files.items()}
        replace_text(folder / MANIFEST, _text({**vars(self), "files": files}))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint without checking the files.

        Raises:
            CheckpointError: it is missing, damaged, or of a newer format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: not a checkpoint, because it has no {MANIFEST}; to start from a model in it, set "
                "model_name_or_path"
            )
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
            version = content["format"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); the checkpoint is damaged") from error
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{path}: format {version} is newer than {FORMAT}, the newest that this release can read; upgrade "
                "deepspeed-alignment"
            )
        content.pop("checksum", None)
        if text != _text(content):
            raise CheckpointError(f"{path}: the content does not match its checksum; the checkpoint is damaged")
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        return cls(**{**content, "files": files})

    def check_files(self, folder: Path) -> None:
        """Raise CheckpointError if a file is missing or does not have the recorded size."""
        for name, record in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise CheckpointError(f"{folder / name}: missing ({error.strerror})") from error
            if size != record.size:
                raise CheckpointError(f"{folder / name}: has {size} bytes instead of {record.size}")

    def check_contents(self, folder: Path, names: Iterable[str]) -> None:
        """Read these files, and raise CheckpointError if the content of one has changed."""
        for name in names:
            checksum = record_of(folder / name).checksum
            if checksum != self.files[name].checksum:
                raise CheckpointError(
                    f"{folder / name}: the content has changed since it was written (checksum {checksum})"
                )

    def share(self, rank: int, ranks: int) -> list[str]:
        """Return the files that one of ``ranks`` readers reads, with about the same number of bytes each."""
        return sorted(self.files, key=lambda name: (-self.files[name].size, name))[rank::ranks]


def _text(content: Mapping[str, Any]) -> str:
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "checksum": checksum}, indent=1, sort_keys=True) + "\n"


def files_in(folder: Path) -> list[str]:
    """The paths of all files below ``folder`` except the manifest, relative to it."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if str(path) != MANIFEST)
