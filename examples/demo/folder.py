"""The settings of the demo, and its folder: created, recognized, and reused if the settings are unchanged.

All sizes and rates are here. The targets of the table are in :mod:`examples.demo.verdict`.
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
from alignment.checkpoint.run_folder import check_output_folder
from alignment.config.errors import OutputError
from alignment.run.durable import write_json
from examples.demo.data import Row

_MARK = "made_by_demo.json"
_KEY = "key.json"


@dataclass(frozen=True)
class StartSettings:
    """The model (1.4 million parameters) and its warm start; any change retrains a saved initial model."""

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
    """One epoch over ``rows``. The learning rates are for a tiny, barely trained model: far above usual ones."""

    rows: int
    batch: int
    beta: float
    learning_rate: float


@dataclass(frozen=True)
class LoraSettings(PreferenceSettings):
    """Adapters of this rank on all linear layers; they need a higher learning rate than full fine-tuning."""

    rank: int = 16


@dataclass(frozen=True)
class OnlineSettings(PreferenceSettings):
    """``rows`` are requests only; ``completions`` are sampled for each."""

    completions: int


@dataclass(frozen=True)
class RewardSettings:
    """One epoch over ``rows`` pairs; any change retrains a saved reward model."""

    rows: int = 800
    batch: int = 16
    learning_rate: float = 2e-4
    centring: float = 0.01  # centers the scores around 0, which are otherwise arbitrary up to a constant


@dataclass(frozen=True)
class Settings:
    """All settings of a run; those of one model are stored under the name of its stage."""

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
    """Create the folder, or accept one of an earlier demo, whose files are replaced.

    Raises:
        OutputError: if it contains anything else, or cannot be written.
    """
    ours = (folder / _MARK).is_file()
    check_output_folder(folder, overwrite=True)
    if not ours and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(
            f"output_dir: {folder} contains files that are not from an earlier demo; choose another folder"
        )
    if not ours:
        write_json(folder / _MARK, {"version": __version__})


def model_key(stage: str, rows: list[Row], settings: Settings, before: str) -> str:
    """Return a hash of what a model depends on: version, seed, settings of its stage, its rows, and earlier models.

    Args:
        stage: the model's stage, a field of ``settings``.
        rows: its training rows.
        settings: settings of the run.
        before: the key of the model that training starts from, or "" for random weights.
    """
    content = [__version__, settings.seed, dataclasses.asdict(getattr(settings, stage)), rows, before]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def kept_seconds(folder: Path, key: str) -> float | None:
    """Return the training time of the model in ``folder``; None if there is none, or its key differs."""
    try:
        kept = json.loads((folder / _KEY).read_text(encoding="utf-8"))
        return float(kept["seconds"]) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete: train again
        return None


def keep(folder: Path, key: str, seconds: float) -> None:
    """Mark a finished model as reusable; written last."""
    write_json(folder / _KEY, {"key": key, "seconds": round(seconds, 1)})


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSONL, to read and to use on the command line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def clear(folder: Path) -> None:
    """Remove a model's folder of an earlier run.

    Raises:
        OutputError: if it cannot be removed.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"output_dir: cannot remove {folder}: {error.strerror or error}") from error
