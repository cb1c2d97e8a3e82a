"""The model card of an export, from the files of its run; missing information is omitted.

A run's files are only read. An external method is named, but its code is not imported for its options.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from alignment.checkpoint.exporting.folder import CARD
from alignment.checkpoint.exporting.report import MergeReport, ModelReport
from alignment.checkpoint.manifest import Manifest
from alignment.config.compatibility.verdicts import judged_names
from alignment.config.errors import OptionError
from alignment.config.fields import option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import mixture_parts
from alignment.config.options_training import LoggingOptions, SavingOptions
from alignment.config.registry import METHODS
from alignment.reporting.model_card import ModelCard, hub_id, is_local

_LIBRARIES = ("deepspeed-alignment", "deepspeed", "torch", "transformers", "peft")
_PREFIX = "checkpoint-"
# Options with locations, options of how a run was started, and those shown elsewhere in the card.
_LEFT_OUT = {
    "method", "output_dir", "merged_output_dir", "model_name_or_path", "adapter_name_or_path", "dataset_name",
    "dataset_mixture", "dataset_config", "dry_run", "per_device_eval_batch_size", "use_cpu",
}  # fmt: skip
_BOOKKEEPING = ("step", "epoch", "num_tokens", "total_flos", "time")
_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".gz", ".zst")


@dataclass(frozen=True)
class Run:
    """The files of the run that a folder comes from.

    Attributes:
        folder: the checkpoint or output folder.
        manifest: manifest of the checkpoint; None for any other folder.
        given: options of the run, if called by the run itself.
    """

    folder: Path
    manifest: Manifest | None = None
    given: Mapping[str, Any] | None = None

    @property
    def root(self) -> Path:
        """The output folder of the run: the folder itself, or the parent of a checkpoint."""
        folder = self.folder.absolute()
        return folder.parent if folder.name.startswith(_PREFIX) else folder

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The resolved options of the run; for a checkpoint without its run, those in its manifest."""
        if self.given is not None:
            return self.given
        recorded = {} if self.manifest is None else self.manifest.options
        return _object(self.root / "options.json") or recorded

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """The newest start in the log: steps, window and rows."""
        return next((line for line in reversed(self._log) if line.get("event") == "start"), {})

    @property
    def method(self) -> str | None:
        """The method's name; for an external method, the name that selected it."""
        recorded = None if self.manifest is None else self.manifest.method
        found = self.options.get("method") or recorded or self.start.get("method")
        return str(found) if found else None

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """The state of transformers' trainer."""
        return _object(self.folder / "trainer_state.json")

    @cached_property
    def _log(self) -> list[dict[str, Any]]:
        try:
            lines = (self.root / "log.jsonl").read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return []
        return [found for line in lines if isinstance(found := _parsed(line), dict)]

    @property
    def step(self) -> int | None:
        """The step whose weights the folder contains; None if unknown."""
        if self.options.get("load_best_model_at_end") and self.folder.absolute() == self.root:
            found = self.state.get("best_global_step")
        else:
            found = self.state.get("global_step") if self.manifest is None else self.manifest.step
        return found if isinstance(found, int) else None

    def metrics(self, sign: str) -> dict[str, Any]:
        """The newest log entry, up to the step, with a name that begins with ``sign``; without bookkeeping entries.

        Several entries of one step, such as those of several evaluation sets, are merged.
        """
        history = self.state.get("log_history")
        entries = [one for one in (history if isinstance(history, list) else self._log) if isinstance(one, dict)]
        found: dict[str, Any] = {}
        newest: Any = None
        for entry in reversed(entries):
            late = self.step is not None and isinstance(entry.get("step"), int) and entry["step"] > self.step
            if late or "event" in entry or not any(str(name).startswith(sign) for name in entry):
                continue
            if found and entry.get("step") != newest:
                break
            newest = entry.get("step")
            found = {**{str(name): value for name, value in entry.items() if name not in _BOOKKEEPING}, **found}
        return found


def recorded_base(source: Path, manifest: Manifest | None) -> str | None:
    """The initial model recorded by the run; None if unknown."""
    found = Run(source, manifest).options.get("model_name_or_path")
    return found if isinstance(found, str) and found else None


def write_card(
    folder: Path,
    source: Path,
    manifest: Manifest | None,
    report: MergeReport | ModelReport,
    base: str | None,
    title: str,
) -> None:
    """Write ``README.md`` into ``folder``, an export of ``source`` with the title ``title``."""
    merged = isinstance(report, MergeReport)
    card = card_of(
        Run(source, manifest),
        title=title,
        is_classifier=report.task == "classifier",
        base=base,
        export=[_origin(merged), *(line for line in report.lines() if not line.startswith("advice"))],
    )
    (folder / CARD).write_text(card.text(), encoding="utf-8")


def card_of(run: Run, *, title: str, is_classifier: bool, base: str | None, export: Sequence[str]) -> ModelCard:
    """The card of a trained model.

    Args:
        run: files of the run.
        title: name of the model.
        is_classifier: whether it is a reward model.
        base: the initial model; None if unknown.
        export: sentences on how the weights were written.
    """
    named = METHODS[run.method] if run.method in METHODS.entries else None
    return ModelCard(
        title=title,
        is_classifier=is_classifier,
        base_model=base,
        base_id=_on_hub(base, run.folder),
        method=run.method if named is None else named.method,
        method_title=None if named is None else named.TITLE,
        papers=[] if named is None else _papers(named.PAPERS, run.options.get("loss_type")),
        datasets=[name for name in _datasets(run.options) if _on_hub(name, run.folder)],
        export=export,
        training=_training(run),
        options=_changed(run.options, named or AlignmentConfig),
        data=_data(run),
        results_of="" if run.step is None else f"step {run.step}",
        train=run.metrics("loss"),
        evaluation={name.removeprefix("eval_"): value for name, value in run.metrics("eval_").items()},
        versions=_installed() if run.manifest is None else run.manifest.versions,
    )


def _origin(merged: bool) -> str:
    if merged:
        return "the trained adapter is merged into the weights"
    return "contains all weights; no adapter is needed"


def _papers(papers: Mapping[str, tuple[str, str]], loss_type: Any) -> list[tuple[str, str]]:
    keys = ("", loss_type) if isinstance(loss_type, str) and loss_type else ("",)
    return [papers[key] for key in keys if key in papers]


def _training(run: Run) -> list[tuple[str, str]]:
    manifest, start = run.manifest, run.start
    found = {
        "steps": run.step if run.step is not None else start.get("steps"),
        "planned steps": start.get("steps") if manifest is None else manifest.total_steps,
        "epochs": run.state.get("epoch"),
        "rows per step": start.get("window") if manifest is None else manifest.window,
        "processes": start.get("world_size") if manifest is None else manifest.world_size,
        "ZeRO stage": None if manifest is None else manifest.stage,
        "initial adapter": run.options.get("adapter_name_or_path"),
    }
    return [(name, f"{value:g}" if isinstance(value, float) else str(value)) for name, value in found.items()
            if value is not None]  # fmt: skip


def _data(run: Run) -> list[tuple[str, str]]:
    facts = [("dataset", name) for name in _datasets(run.options)]
    rows, dropped = run.start.get("rows"), run.start.get("dropped")
    if isinstance(rows, int):
        facts.append(("rows", f"{rows:,}"))
    if isinstance(dropped, dict):
        facts += [(f"dropped ({reason})", str(count)) for reason, count in dropped.items()]
    return facts


def _datasets(options: Mapping[str, Any]) -> list[str]:
    """The names of the training datasets."""
    found = options.get("dataset_name")
    names = [found] if isinstance(found, str) else []
    mixture = options.get("dataset_mixture")
    if not isinstance(mixture, (list, dict)):
        return names
    try:
        return [*names, *(part.dataset_name for part in mixture_parts(mixture))]
    except OptionError:  # not in the format that a run writes
        return names


def _changed(options: Mapping[str, Any], declared: Any) -> dict[str, Any]:
    """The options that affect the weights and differ from their defaults."""
    defaults = {one.name: one.default for one in option_fields(declared)}
    others = {one.name for part in (LoggingOptions, SavingOptions) for one in dataclasses.fields(part)} | _LEFT_OUT
    others |= judged_names(declared)
    return {
        name: value
        for name, value in options.items()
        if name not in others and value is not None and value != defaults.get(name)
    }


def _on_hub(name: str | None, source: Path) -> str | None:
    """The name as a hub id, unless it is the name of a local file or folder, here or next to the run."""
    found = hub_id(name)
    if name is None or found is None or is_local(name) or name.endswith(_FILE_ENDINGS):
        return None
    beside = (Path(), *source.absolute().parents)
    return None if any((place / name).exists() for place in beside) else found


def _object(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty if it cannot be read."""
    try:
        found = _parsed(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _installed() -> dict[str, str]:
    """Installed versions, for runs that have not recorded those of training."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
