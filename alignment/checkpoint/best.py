"""Track the best checkpoint by an evaluation metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from transformers import TrainerState

from alignment.checkpoint.manifest import Manifest
from alignment.config.errors import CheckpointError, OptionError, did_you_mean, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import from_first_rank, on_first_rank


def check_best_metric(args: AlignmentConfig, measured: Iterable[str], eval_names: Iterable[str]) -> None:
    """Raise OptionError unless evaluation computes ``metric_for_best_model``.

    Besides the loss, it computes the ``measured`` metrics, of each set in ``eval_names`` (``""`` for a single one).
    """
    metrics, wanted = {"loss", *measured}, args.metric_for_best_model
    if "rewards/chosen" in metrics:
        metrics.add("rewards/margins")
    known = {f"{name}_{metric}" if name else metric for name in eval_names for metric in metrics}
    if wanted is not None and wanted.removeprefix("eval_") not in known:
        near = did_you_mean(wanted.removeprefix("eval_"), known) or f"; set one of {', '.join(sorted(known))}"
        raise OptionError(f"{setting('metric_for_best_model', wanted)}: evaluation has no such metric{near}")


class BestModel:
    """Follows ``metric_for_best_model``; the best evaluation and its checkpoint are in transformers' state."""

    def __init__(self, args: AlignmentConfig, state: TrainerState) -> None:
        self.args, self.state = args, state
        self._before = state.best_metric, state.best_global_step, state.best_model_checkpoint

    @property
    def saves(self) -> bool:
        """Whether each new best is saved, independently of ``save_strategy``."""
        return self.args.load_best_model_at_end or self.args.save_strategy == "best"

    @property
    def folder(self) -> Path | None:
        """The folder of the best checkpoint, or None."""
        return None if self.state.best_model_checkpoint is None else Path(self.state.best_model_checkpoint)

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation; return whether it is the best so far. A value that is not finite never is."""
        wanted = self.args.metric_for_best_model
        value = None if wanted is None else metrics.get(f"eval_{wanted.removeprefix('eval_')}")
        if value is None or not math.isfinite(value):
            return False
        best = self.state.best_metric
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self._before = best, self.state.best_global_step, self.state.best_model_checkpoint
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True

    def saved(self, folder: Path) -> None:
        """Record that the current step has a checkpoint."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)

    def lost(self) -> None:
        """Record that this checkpoint could not be written: return to the previous best if its weights are needed."""
        if self.state.best_global_step == self.state.global_step:
            metric, step, self.state.best_model_checkpoint = self._before
            if self.saves:
                self.state.best_metric, self.state.best_global_step = metric, step

    def moved_to(self, output_dir: Path) -> str | None:
        """Point to the checkpoint of the same name in this folder; return a message if it is damaged. Collective."""
        if self.folder is None:
            return None
        folder = output_dir / self.folder.name
        self.state.best_model_checkpoint = str(folder)
        damage: str | None = on_first_rank(lambda: _damage(folder, read=False))
        if damage is None or not self.saves:
            return None
        self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        return f"the best checkpoint so far cannot be used ({damage}); only later evaluations count"

    def load(self, restore: Callable[[Path], None], tell: Callable[[str], None]) -> int:
        """Load the best weights by ``restore`` if they are usable and not the last; return their step. Collective."""
        folder, last = from_first_rank(self.folder), self.state.global_step
        if folder is not None and self.state.best_global_step == self.state.global_step:
            return last
        damage = "no evaluation was finite" if folder is None else on_first_rank(lambda: _damage(folder, read=True))
        if damage is not None:
            tell(f"load_best_model_at_end: {damage}; keeping the weights of the last step")
            return last
        restore(folder)
        tell(f"loaded the weights of {folder.name}: {self.args.metric_for_best_model} {self.state.best_metric:.6g}")
        return self.state.best_global_step or last


def _damage(folder: Path, *, read: bool) -> str | None:
    """Return what is wrong with the model in a checkpoint, or None; with ``read``, also compare checksums."""
    try:
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
        if read:
            manifest.check_contents(folder, (name for name in manifest.files if not name.startswith("optimizer-")))
    except CheckpointError as error:
        return str(error)
    return None
