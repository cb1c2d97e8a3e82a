"""What a run depends on, and its folder: made, recognised, and used again for what depends on the same.

The settings are the demo's numbers in one place. What the table must reach is in :mod:`examples.demo.verdict`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alignment import __version__
from alignment.config.errors import OutputError
from alignment.training.checkpointing.output_folder import check_output_folder, write_json
from examples.demo.data import Row

_MARK = "made_by_demo.json"
_KEY = "key.json"


@dataclass(frozen=True)
class StartSettings:
    """The model (1.4 million parameters) and its warm start; any change makes a kept start model stale."""

    hidden_size: int = 192
    layers: int = 3
    heads: int = 4
    intermediate_size: int = 512
    rows: int = 6400
    epochs: float = 2.5
    batch: int = 32
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class PreferenceSettings:
    """One pass over ``rows``. The rates are for a tiny model that has hardly been trained: far above a user's."""

    rows: int
    batch: int
    beta: float
    learning_rate: float


@dataclass(frozen=True)
class LoraSettings(PreferenceSettings):
    """Adapters of this rank on all linear layers; they need a higher rate than the whole model."""

    rank: int = 16


@dataclass(frozen=True)
class OnlineSettings(PreferenceSettings):
    """``rows`` are requests alone; ``completions`` are sampled for each."""

    completions: int


@dataclass(frozen=True)
class RewardSettings:
    """One pass over ``rows`` pairs; any change makes a kept reward model stale."""

    rows: int = 800
    batch: int = 16
    learning_rate: float = 2e-4
    centring: float = 0.01  # without it, warm and curt would lie anywhere, as long as they are apart


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on; what belongs to one model is under the name of its stage."""

    seed: int = 0
    held_out: int = 256
    start: StartSettings = field(default_factory=StartSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    kto: PreferenceSettings = field(default_factory=lambda: PreferenceSettings(3200, 32, 1.0, 4e-4))
    kto_lora: LoraSettings = field(default_factory=lambda: LoraSettings(2400, 32, 1.0, 1e-3))
    cpo: PreferenceSettings = field(default_factory=lambda: PreferenceSettings(1600, 16, 1.0, 4e-4))
    online_dpo: OnlineSettings = field(default_factory=lambda: OnlineSettings(1600, 16, 1.0, 2e-4, completions=4))
    temperature: float = 1.0
    max_new_tokens: int = 40


def open_folder(folder: Path) -> None:
    """Make the folder, or take one that an earlier demo made; later steps replace what lies in it.

    Raises:
        OutputError: it holds something else, or cannot be written.
    """
    ours = (folder / _MARK).is_file()
    check_output_folder(folder, overwrite=True)
    if not ours and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"output_dir: {folder} holds something else than an earlier demo; choose another folder")
    if not ours:
        write_json(folder / _MARK, {"version": __version__})


def model_key(stage: str, rows: list[Row], settings: Settings, before: str) -> str:
    """What a model depends on, as a hash: version, seed, its stage's settings, its rows to the letter, earlier keys.

    Args:
        stage: the model's, a field of ``settings``.
        rows: that it is trained on.
        settings: of the run.
        before: the key of the model that it is trained from, or "" for random weights.
    """
    content = [__version__, settings.seed, dataclasses.asdict(getattr(settings, stage)), rows, before]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def kept_seconds(folder: Path, key: str) -> float | None:
    """How long the model kept in ``folder`` took to train; None if there is none, or it was made from other things."""
    try:
        kept = json.loads((folder / _KEY).read_text(encoding="utf-8"))
        return float(kept["seconds"]) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that was cut off: train again
        return None


def keep(folder: Path, key: str, seconds: float) -> None:
    """Mark a finished model as one that can be used again; the last thing written into its folder."""
    write_json(folder / _KEY, {"key": key, "seconds": round(seconds, 1)})


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSONL, for the reader and for the command line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def clear(folder: Path) -> None:
    """Remove one model's folder from an earlier run.

    Raises:
        OutputError: it cannot be removed.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"output_dir: {folder} cannot be removed: {error.strerror or error}") from error
