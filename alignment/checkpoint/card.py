"""The model card of a trained model, from the files of its run: for exports and uploads.

Missing information is omitted. A run's files are only read; the code of an external method is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from alignment.checkpoint.folder import checkpoint_step
from alignment.checkpoint.manifest import Manifest
from alignment.config.compatibility.verdicts import judged_names
from alignment.config.errors import CheckpointError, OptionError
from alignment.config.fields import option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import mixture_parts
from alignment.config.options_training import LoggingOptions, SavingOptions
from alignment.config.registry import METHODS
from alignment.reporting.model_card import ModelCard, hub_id

# Options with locations, options of how a run was started, and those shown elsewhere in the card.
_LEFT_OUT = {
    "method", "output_dir", "merged_output_dir", "model_name_or_path", "adapter_name_or_path", "dataset_name",
    "dataset_mixture", "dataset_config", "dry_run", "per_device_eval_batch_size", "use_cpu",
}  # fmt: skip
_BOOKKEEPING = ("step", "epoch", "num_tokens", "total_flos", "time")
_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".gz", ".zst")
Facts = Mapping[str, Any]


def card_of(
    folder: Path,
    title: str,
    is_classifier: bool,
    base: str | None,
    export: Sequence[str],
    options: Facts | None = None,
) -> ModelCard:
    """The card of a trained model.

    Args:
        folder: the checkpoint or output folder that contains the model.
        title: name of the model.
        is_classifier: whether it is a reward model.
        base: the initial model; None for the one in the options.
        export: sentences on how the weights were written.
        options: options of the run; None for those in its files.
    """
    absolute = folder.absolute()
    root = absolute if checkpoint_step(absolute) is None else absolute.parent
    state, (run, recorded) = _object(_text(folder / "trainer_state.json")), _run(folder, root)
    options = options or _object(_text(root / "options.json")) or recorded
    is_best = options.get("load_best_model_at_end") and absolute == root
    step = state.get("best_global_step" if is_best else "global_step")
    method = options.get("method") or run.get("method")
    named = METHODS[method] if method in METHODS.entries else None
    base = base or options.get("model_name_or_path")
    datasets = _datasets(options)
    loss_type = options.get("loss_type")
    several = loss_type if isinstance(loss_type, list) else [loss_type]
    keys = dict.fromkeys(("", *(one for one in several if isinstance(one, str))))
    training = {
        "steps": step or run.get("steps"),
        "planned steps": run.get("steps"),
        "epochs": state.get("epoch"),
        "rows per step": run.get("window"),
        "processes": run.get("world_size"),
        "ZeRO stage": run.get("stage"),
        "initial adapter": options.get("adapter_name_or_path"),
    }
    dropped = {f"dropped ({reason})": count for reason, count in run.get("dropped", {}).items()}
    evaluation = _metrics(state, step, "eval_")
    return ModelCard(
        title=title,
        is_classifier=is_classifier,
        base_model=base,
        base_id=_on_hub(base, absolute),
        method=method if named is None else named.method,
        method_title=None if named is None else named.TITLE,
        papers=[named.PAPERS[key] for key in keys if key in named.PAPERS] if named is not None else [],
        datasets=[name for name in datasets if _on_hub(name, absolute)],
        export=export,
        training=_known(training),
        options=_changed(options, named or AlignmentConfig),
        data=[*(("dataset", name) for name in datasets), *_known({"rows": run.get("rows"), **dropped})],
        results_of="" if step is None else f"step {step}",
        train=_metrics(state, step, "loss"),
        evaluation={name.removeprefix("eval_"): value for name, value in evaluation.items()},
        versions=run.get("versions", {}),
    )


def _run(folder: Path, root: Path) -> tuple[Facts, Facts]:
    """What the newest start in the run's log and the manifest say of the run, and the options in the manifest."""
    events = map(_object, reversed(_text(root / "log.jsonl").splitlines()))
    start = next((event for event in events if event.get("event") == "start"), {})
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return start, {}
    names = ("method", "window", "world_size", "stage", "versions")
    facts = {"steps": manifest.total_steps, **{name: getattr(manifest, name) for name in names}}
    return {**start, **facts}, manifest.options


def _metrics(state: Facts, step: int | None, prefix: str) -> Facts:
    """The newest metrics, up to a step, in log entries with a name that begins with ``prefix``.

    Several entries of one step, such as those of several evaluation sets, are merged.
    """
    entries = [one for one in state.get("log_history", ()) if any(name.startswith(prefix) for name in one)]
    entries = [one for one in entries if step is None or one["step"] <= step]
    newest = [one for one in entries if one["step"] == entries[-1]["step"]]
    return {name: value for one in newest for name, value in one.items() if name not in _BOOKKEEPING}


def _known(facts: Facts) -> list[tuple[str, str]]:
    """Facts as text, without unknown ones."""
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in facts.items()}
    return [(name, text) for name, text in texts.items() if facts[name] is not None]


def _datasets(options: Mapping[str, Any]) -> list[str]:
    """The names of the training datasets."""
    mixture = options.get("dataset_mixture")
    try:
        parts = mixture_parts(mixture) if mixture else []
    except OptionError:  # not in the format that a run writes
        parts = []
    return [name for name in (options.get("dataset_name"), *(part.dataset_name for part in parts)) if name]


def _changed(options: Mapping[str, Any], declared: Any) -> Facts:
    """The options that affect the weights and differ from their defaults."""
    defaults = {one.name: one.default for one in option_fields(declared)}
    others = {one.name for part in (LoggingOptions, SavingOptions) for one in fields(part)}
    shown = {name: options[name] for name in options if name not in others | _LEFT_OUT | judged_names(declared)}
    return {name: value for name, value in shown.items() if value is not None and value != defaults.get(name)}


def _on_hub(name: str | None, folder: Path) -> str | None:
    """The name as a hub id, unless it is the name of a local file or folder, here or next to the run."""
    found, places = hub_id(name), (Path(), *folder.parents)
    is_file = found is None or found.endswith(_FILE_ENDINGS) or any((place / found).exists() for place in places)
    return None if is_file else found


def _text(file: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _object(text: str) -> Facts:
    """The JSON object in ``text``; empty if it is something else, such as a line that was cut off."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
