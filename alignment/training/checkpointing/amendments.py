"""What a rewind adds to the checkpoint that the run has returned to.

Which windows a run leaves out is decided after that checkpoint was written. Were it known in memory alone, a run that
is killed before its next checkpoint would train on them after all.
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
    """Put the parts of ``state`` that a rewind changes into the checkpoint ``folder``, beside what was saved of them.

    Raises:
        OSError: the file cannot be written.
        OutputError: the log cannot.
    """
    replace_text(folder / AMENDMENTS, json.dumps({name: state.parts[name].state_dict() for name in _PARTS}))


def amended(folder: Path, shared: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint's ``folder``, as a rewind may have amended it.

    Args:
        folder: of the checkpoint.
        shared: what was saved of the parts that are the same on every rank.

    Raises:
        CheckpointError: there are amendments that cannot be read.
    """
    path = folder / AMENDMENTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**shared, **{name: found[name] for name in _PARTS}}
    except FileNotFoundError:
        return shared
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {error}") from error
