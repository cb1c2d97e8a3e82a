"""One faulty command of ``test_bad_input``."""

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
DEEP = 5000  # levels of brackets that no reader follows


@dataclass(frozen=True)
class Case:
    """One faulty command.

    ``says`` must all stand in the error's line; there and in options, ``@name`` is a path in the test's own folder. In
    options, ``%name`` is a model's path.
    ``model`` is one of :func:`write_models`; ``data`` are the rows or the text of ``@data.jsonl``; ``files`` are more
    such files. An option of None is left out. ``arguments`` take the place of all options. ``make`` is called with the
    test's folder and that of the models, for what is no text file. ``environment`` are variables, and None for those
    that have to go. ``command`` is the module of the command.
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
    """A fault in a DeepSpeed JSON."""
    files = {f"{key}.json": json.dumps(content)}
    return Case(name, says, {key: f"@{key}.json", **options}, method=method, files=files)


def file_of(name: str, content: str | bytes) -> Callable[[Path, Path], object]:
    """Makes a file with that content, in the place of one that is there."""

    def make(folder: Path, models: Path) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return make


def folder_of(*names: str) -> Callable[[Path, Path], object]:
    """Makes folders, in the place of files that are there."""

    def make(folder: Path, models: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)
            (folder / name).mkdir(parents=True)

    return make
