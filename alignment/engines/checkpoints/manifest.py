"""The manifest of a checkpoint: every file with size and checksum, and the run that wrote them.

It is written last. A folder whose manifest is there and right is a whole checkpoint; nothing else tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import xxhash

from alignment.config.errors import CheckpointError
from alignment.engines.checkpoints.records import FileRecord, record_of
from alignment.reporting.durable import replace_text

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        run: the name of the run, which its restarts share.
        step: optimizer steps that were done.
        method: of alignment.
        world_size: ranks that wrote it.
        stage: ZeRO stage.
        window: rows of one optimizer step.
        total_steps: of the whole run.
        resumable: whether it holds more than the model.
        versions: of the libraries, by name.
        fingerprints: what stands for data, models and reward sources.
        options: the resolved ones.
        files: size and checksum of every file, by its path in the folder.
        format: version of this format.
    """

    run: str
    step: int
    method: str
    world_size: int
    stage: int
    window: int
    total_steps: int
    resumable: bool
    versions: dict[str, str]
    fingerprints: dict[str, Any]
    options: dict[str, Any]
    files: dict[str, FileRecord]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, after everything that it lists."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content["files"] = {
            name: {"size": record.size, "checksum": record.checksum} for name, record in sorted(self.files.items())
        }
        replace_text(folder / MANIFEST, _text(content))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint, whose files are not looked at.

        Raises:
            CheckpointError: there is none, it is damaged, or of a newer format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise CheckpointError(_no_manifest(folder))
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
            found = content.pop("format")
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: it cannot be read ({error}), so the checkpoint is damaged") from error
        if isinstance(found, int) and found > FORMAT:
            raise CheckpointError(f"{path}: it has format {found}, and this release knows up to {FORMAT}; upgrade it")
        checksum = content.pop("checksum", None)
        if checksum != _checksum({**content, "format": found}) or text != _text({**content, "format": found}):
            raise CheckpointError(f"{path}: it is not as it was written, so the checkpoint is damaged")
        records = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        return cls(**content, files=records, format=found)

    def check_files(self, folder: Path) -> None:
        """Look for every file, and at its size.

        Raises:
            CheckpointError: one is missing, or has another size.
        """
        for name, record in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise CheckpointError(f"{folder / name}: it is missing ({error.strerror})") from error
            if size != record.size:
                raise CheckpointError(f"{folder / name}: it has {size} bytes, and {record.size} were written")

    def check_contents(self, folder: Path, names: Iterable[str]) -> None:
        """Read these files once, and compare their checksums.

        Raises:
            CheckpointError: one is not as it was written.
        """
        for name in names:
            try:
                checksum = record_of(folder / name).checksum
            except OSError as error:
                raise CheckpointError(f"{folder / name}: it cannot be read ({error.strerror or error})") from error
            if checksum != self.files[name].checksum:
                raise CheckpointError(f"{folder / name}: its content is not what was written (checksum {checksum})")

    def shares(self, ranks: int) -> list[list[str]]:
        """The files dealt out to ``ranks`` readers, about equally many bytes each."""
        shares: list[list[str]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for name, record in sorted(self.files.items(), key=lambda entry: (-entry[1].size, entry[0])):
            least = loads.index(min(loads))
            shares[least].append(name)
            loads[least] += record.size
        return shares


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _no_manifest(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    if any(folder.glob("*.safetensors")):
        return (
            f"{folder}: it has a model and no {MANIFEST}, as of an older release or of another program, so no run can "
            "go on from it; start a new one with model_name_or_path"
        )
    return f"{folder}: it has no {MANIFEST}, so it is no checkpoint"


def files_in(folder: Path) -> list[str]:
    """The paths of all files below ``folder``, relative to it, but for the manifest."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if str(path) != MANIFEST)
