"""An invalid command for ``test_bad_input``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT = {
    "prompt": [{"role": "user", "content": "hi"}],
    "completion": [{"role": "assistant", "content": "oh"}],
    "label": True,
}
DEEP = 5000  # nesting depth that no parser supports


@dataclass(frozen=True)
class Case:
    """An invalid command.

    All texts in ``says`` must occur in the error line; there and in options, ``@name`` is a path in the test's folder,
    and ``%name`` in options is the path of a model. ``model`` is one of :func:`write_models`; ``data`` are the rows or
    the text of ``@data.jsonl``; ``files`` are further files of this kind. Options that are None are omitted.
    ``arguments`` replace all options. ``make`` is called with the test's folder and the models' folder to create
    anything that is not a text file. ``environment`` are variables; None unsets a variable. ``command`` is the module
    of the command.
    """

    name: str
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    data: list[dict[str, Any]] | str | None = None
    model: str = "good"
    method: str = "kto"
    files: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    make: Callable[[Path, Path], object] | None = None
    environment: dict[str, str | None] = field(default_factory=dict)
    command: str = "alignment.cli.train"


def deepspeed_case(
    name: str, content: dict[str, Any], *says: str, key: str = "deepspeed", method: str = "kto", **options: Any
) -> Case:
    """An invalid DeepSpeed configuration."""
    files = {f"{key}.json": json.dumps(content)}
    return Case(name, says, {key: f"@{key}.json", **options}, method=method, files=files)


def file_of(name: str, content: str | bytes) -> Callable[[Path, Path], object]:
    """Return a function that writes a file, replacing an existing one."""

    def make(folder: Path, models: Path) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return make


def folder_of(*names: str) -> Callable[[Path, Path], object]:
    """Return a function that creates folders, replacing existing files."""

    def make(folder: Path, models: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)
            (folder / name).mkdir(parents=True)

    return make
