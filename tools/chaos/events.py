"""Report what a rank does to its output folder as named events, without hooks in the package.

Files are observed through the system calls that every checkpoint needs (rename, sync, write, truncate, unlink),
so that events do not depend on the names of the package's functions. Phases are observed through its methods.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Half = Callable[[], Any]
Hear = Callable[[str, Half | None], None]
_AFTER = {"folder": "build", "train": "end"}  # names for the time between two phases, by the first one
_HIDDEN = re.compile(r"^\.(checkpoint-)\d+\.(partial|removed)$")


def kind(path: str, output_dir: str) -> str | None:
    """Classify a path, without numbers and tokens; None for paths outside of the output folder.

    The kinds are ``checkpoint``, ``partial``, ``removed``, ``new/FILE`` in a partial checkpoint, ``old/FILE`` in a
    removed one, and the name of any other file.
    """
    relative = os.path.relpath(path, output_dir)
    if relative == "." or relative.startswith(".."):
        return None
    parts = [part for part in relative.split(os.sep) if part != ".partial"]
    if not parts:
        return "model/folder"
    hidden = _HIDDEN.match(parts[0])
    if hidden and len(parts) == 1:
        return hidden[2]
    name = parts[-1]
    name = re.sub(r"\d+", "", name).replace("-of-", "").replace("-.", ".")
    if hidden:
        return f"{'new' if hidden[2] == 'partial' else 'old'}/{name}"
    return name.rstrip("-") if name == "checkpoint-" else name


_VERBS = {"ab": "append", "wb": "write"}


class Events:
    """Calls ``hear`` with ``before WHAT``, ``after WHAT``, or ``half WHAT`` and a function that does half of it."""

    def __init__(self, output_dir: Path, hear: Hear) -> None:
        self.output_dir, self.hear = str(output_dir.absolute()), hear
        self.phases = ["start"]

    def kind(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Apply :func:`kind` to the argument of a call."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        return kind(os.path.abspath(os.fspath(path)), self.output_dir)

    def follow_files(self) -> None:
        """Report renames, syncs, removals, writes and appended lines in the output folder."""
        self._around(os, "rename", lambda source, target, **_: ("rename", self.kind(target)))
        self._around(os, "replace", lambda source, target, **_: ("rename", self.kind(target)))
        self._around(os, "fsync", lambda descriptor: ("sync", self.kind(descriptor)))
        self._around(os, "truncate", lambda path, length: ("cut", self.kind(path)))
        for name in ("unlink", "remove", "rmdir"):
            self._around(os, name, lambda path, dir_fd=None: ("remove", self.kind(path, dir_fd)))
        opened = pathlib.Path.open

        def followed(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = opened(path, mode, *args, **kwargs)
            if mode not in _VERBS or (what := self.kind(path)) is None:
                return file
            return _Written(file, lambda half: self.hear(f"half {_VERBS[mode]} {what}", half))

        pathlib.Path.open = followed  # type: ignore[method-assign, assignment]

    def _around(self, owner: Any, name: str, describe: Callable[..., tuple[str, str | None]]) -> None:
        """Report calls of ``owner.name``, described as a verb and its object; None for calls to leave out."""
        call = getattr(owner, name)

        def followed(*args: Any, **kwargs: Any) -> Any:
            verb, what = describe(*args, **kwargs)
            if what is None:
                return call(*args, **kwargs)
            self.hear(f"before {verb} {what}", None)
            result = call(*args, **kwargs)
            self.hear(f"after {verb} {what}", None)
            return result

        setattr(owner, name, followed)

    def follow_run(self) -> None:
        """Report phases, the parts of a checkpoint, and each forward pass in a phase."""
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

        from alignment.checkpoint import resume, writer
        from alignment.checkpoint.manifest import Manifest
        from alignment.checkpoint.run_folder import RunFolder
        from alignment.checkpoint.tensors import TensorFile
        from alignment.rollout.engine import RolloutEngine
        from alignment.run.lock import RunLock
        from alignment.training import trainer
        from alignment.training.loop import TrainingLoop

        for owner, name, phase in (
            (RunFolder, "enter", "folder"),
            (trainer.AlignmentTrainer, "_restore", "load"),
            (TrainingLoop, "run", "train"),
            (RolloutEngine, "generate", "rollout"),
            (trainer.AlignmentTrainer, "evaluate", "evaluate"),
            (writer.CheckpointWriter, "write", "save"),
            (writer, "prune_checkpoints", "remove"),
            (trainer.AlignmentTrainer, "save_model", "end"),
        ):
            self._in_phase(owner, name, phase)
        parts: tuple[tuple[Any, str, str], ...] = (
            (AutoModelForCausalLM, "from_pretrained", "loading a model"),
            (PreTrainedModel, "save_pretrained", "model"),
            (PreTrainedTokenizerBase, "save_pretrained", "tokenizer"),
            (writer, "write_fragments", "fragments"),
            (resume, "read_fragments", "reading fragments"),
            (TensorFile, "read_into", "reading a tensor"),
            (Manifest, "check_contents", "comparing checksums"),
            (RunLock, "acquire", "locking"),
            (torch.nn.Embedding, "forward", "forward"),
        )
        for part, name, what in parts:
            self._around(part, name, lambda *_, what=what, **__: (what, f"in {self.phases[-1]}"))

    def _in_phase(self, owner: Any, name: str, phase: str) -> None:
        call = getattr(owner, name)

        def followed(*args: Any, **kwargs: Any) -> Any:
            self.phases.append(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.phases.pop()
                if len(self.phases) == 1:
                    self.phases[0] = _AFTER.get(phase, self.phases[0])

        setattr(owner, name, followed)


class _Written:
    """A file opened for writing, whose writer can be killed in the middle of a part."""

    def __init__(self, file: Any, hear: Callable[[Half], None]) -> None:
        self._file, self._hear = file, hear

    def __enter__(self) -> _Written:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        """Report the event, then write."""
        self._hear(lambda: (self._file.write(bytes(data)[: len(data) // 2]), self._file.flush()))
        written: int = self._file.write(data)
        return written
