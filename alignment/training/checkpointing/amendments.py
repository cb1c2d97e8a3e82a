"""Amend a checkpoint that the run has rewound to.

The omitted windows are chosen after that checkpoint was written. If they were only in memory, a run killed before its
next checkpoint would train on them after all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alignment.config.errors import CheckpointError
from alignment.reporting.durable import replace_text
from alignment.training.run_state import RunState

AMENDMENTS = "run_state.amended.json"
_PARTS = ("bad_steps", "log")


def amend(folder: Path, state: RunState) -> None:
    """Save the parts of ``state`` that a rewind changes in the checkpoint ``folder``, next to their saved values.

    Raises:
        OSError: if the file cannot be written.
        OutputError: if the log cannot be written.
    """
    replace_text(folder / AMENDMENTS, json.dumps({name: state.parts[name].state_dict() for name in _PARTS}))


def amended(folder: Path, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint, with the amendments of a rewind if there are any.

    Args:
        folder: the checkpoint.
        shared: the saved state of the parts that are the same on every rank.

    Raises:
        CheckpointError: if there are amendments that cannot be read.
    """
    path = folder / AMENDMENTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**shared, **{name: found[name] for name in _PARTS}}
    except FileNotFoundError:
        return shared
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
