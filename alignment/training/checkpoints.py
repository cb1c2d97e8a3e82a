"""The output folder, its checkpoints, and which of them is the best."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.config.errors import OptionError, OutputError, did_you_mean, setting
from alignment.engines.checkpoints.lock import LOCK
from alignment.reporting.durable import replace_text

if TYPE_CHECKING:
    from transformers import TrainerState

    from alignment.config.options import AlignmentConfig


CHECKPOINT_PREFIX = "checkpoint-"


def check_output_folder(folder: Path, overwrite: bool, option: str = "output_dir") -> None:
    """Refuse a folder that cannot be used, leaving nothing behind.

    Raises:
        OutputError: it is a file, cannot be written, or is not empty (unless ``overwrite``).
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        if not existing.is_dir():
            raise OutputError(f"{option}: {existing} is not a folder; choose another {option}")
        if existing == folder and _in_use(folder) and not overwrite:
            raise OutputError(
                f"{option}: {folder} is not empty; choose another folder"
                + (" or set overwrite_output_dir: true" if option == "output_dir" else "")
            )
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{option}: {folder} cannot be written: {reason}; choose another {option}") from error


def _in_use(folder: Path) -> bool:
    """Whether there is anything but a lock: of this run, or of one that was killed before it wrote."""
    return any(not path.name.startswith(LOCK) for path in folder.iterdir())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON, making the folder; a file that is there is replaced whole.

    Raises:
        OutputError: it cannot be written; a file that was there is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise OutputError(f"output_dir: could not write {path}: {error}") from error


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the oldest step first."""
    found = [p for p in folder.glob(f"{CHECKPOINT_PREFIX}*") if p.name.removeprefix(CHECKPOINT_PREFIX).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(CHECKPOINT_PREFIX)))


def prune_checkpoints(folder: Path, limit: int | None, keep: Path | None = None) -> None:
    """Remove the oldest checkpoints until ``limit`` are left. The newest and ``keep`` stay in any case."""
    found = checkpoints(folder)
    if limit is None or not found:
        return
    dear = [found[-1], *([keep] if keep in found[:-1] else [])]
    ordered = [*dear, *(path for path in reversed(found) if path not in dear)]
    for old in ordered[max(limit, len(dear)) :]:
        shutil.rmtree(old)


def check_best_metric(args: AlignmentConfig, measured: Iterable[str], eval_names: Iterable[str]) -> None:
    """Whether evaluation will give ``metric_for_best_model``.

    Args:
        args: the options.
        measured: the metrics that evaluation gives beside the loss.
        eval_names: names of the evaluation sets; a single one is called ``""``.

    Raises:
        OptionError: it will not; with the nearest one that it will.
    """
    metrics = {"loss", *measured}
    if "rewards/chosen" in metrics:
        metrics.add("rewards/margins")
    wanted = args.metric_for_best_model
    known = {f"{name}_{metric}" if name else metric for name in eval_names for metric in metrics}
    if wanted is not None and wanted.removeprefix("eval_") not in known:
        near = did_you_mean(wanted.removeprefix("eval_"), known) or f"; set one of {', '.join(sorted(known))}"
        raise OptionError(f"{setting('metric_for_best_model', wanted)}: evaluation gives no such metric{near}")


class BestModel:
    """Follows the metric that decides.

    Args:
        args: ``metric_for_best_model`` and ``greater_is_better``.
        state: where ``best_metric``, ``best_global_step`` and ``best_model_checkpoint`` are kept.
    """

    def __init__(self, args: AlignmentConfig, state: TrainerState) -> None:
        self.args, self.state = args, state

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Take note of an evaluation; whether it is the best so far. One that is not finite never is."""
        wanted = self.args.metric_for_best_model
        if wanted is None:
            return False
        value = metrics.get(f"eval_{wanted.removeprefix('eval_')}")
        if value is None or not math.isfinite(value):
            return False
        best = self.state.best_metric
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True

    def saved(self, folder: Path) -> None:
        """Take note of a checkpoint of the current step."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)

    @property
    def folder(self) -> Path | None:
        """The best checkpoint's folder, once there is one."""
        return None if self.state.best_model_checkpoint is None else Path(self.state.best_model_checkpoint)
