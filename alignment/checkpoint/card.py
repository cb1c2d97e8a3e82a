"""The model card of a trained model, from the files of its run: for exports and uploads.

Missing information is omitted. A run's files are only read; the code of an external method is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from alignment.checkpoint.folder import checkpoint_step
from alignment.checkpoint.manifest import MANIFEST
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import mixture_parts
from alignment.config.options_training import LoggingOptions, SavingOptions
from alignment.config.registry import METHODS
from alignment.reporting.model_card import ModelCard, hub_id
from alignment.reporting.run_content import changed_options
from alignment.reporting.run_view import Log, read_object

# Options with locations, of how a run was started, without effect on weights, and those shown elsewhere in the card.
_LEFT_OUT = {
    "method", "output_dir", "merged_output_dir", "model_name_or_path", "adapter_name_or_path", "dataset_name",
    "dataset_mixture", "dataset_config", "dry_run", "per_device_eval_batch_size", "use_cpu",
    *(one.name for part in (LoggingOptions, SavingOptions) for one in fields(part)),
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
    """The card of the model in ``folder``, a checkpoint or an output folder.

    ``export`` are sentences on how its weights were written; ``base`` and ``options`` are by default those of the run.
    """
    absolute = folder.absolute()
    root = absolute if checkpoint_step(absolute) is None else absolute.parent
    state, manifest = read_object(folder / "trainer_state.json"), read_object(folder / MANIFEST)
    run = {**Log(root / "log.jsonl").newest("start"), **manifest}
    options = options or read_object(root / "options.json") or manifest.get("options", {})
    is_best = options.get("load_best_model_at_end") and absolute == root
    step = state.get("best_global_step" if is_best else "global_step")
    method = options.get("method") or run.get("method")
    named = METHODS[method] if method in METHODS.entries else None
    base = base or options.get("model_name_or_path")
    parts = mixture_parts(options["dataset_mixture"]) if options.get("dataset_mixture") else []
    datasets = [name for name in (options.get("dataset_name"), *(part.dataset_name for part in parts)) if name]
    losses = options.get("loss_type") or []
    keys = ("", *([losses] if isinstance(losses, str) else losses))
    steps, changed = run.get("total_steps") or run.get("steps"), changed_options(options, named or AlignmentConfig)
    training = {
        "steps": step or steps,
        "planned steps": steps,
        "epochs": state.get("epoch"),
        "rows per step": run.get("window"),
        "ranks": run.get("world_size"),
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
        papers=[named.PAPERS[key] for key in keys if key in named.PAPERS] if named else [],
        datasets=[name for name in datasets if _on_hub(name, absolute)],
        export=export,
        training=_known(training),
        options={name: value for name, value, _ in changed if name not in _LEFT_OUT},
        data=[*(("dataset", name) for name in datasets), *_known({"rows": run.get("rows"), **dropped})],
        results_of="" if step is None else f"step {step}",
        train=_metrics(state, step, "loss"),
        evaluation={name.removeprefix("eval_"): value for name, value in evaluation.items()},
        versions=run.get("versions", {}),
    )


def _metrics(state: Facts, step: int | None, prefix: str) -> Facts:
    """The newest metrics, up to a step, in log entries with a name that begins with ``prefix``, of all sets."""
    entries = [one for one in state.get("log_history", ()) if any(name.startswith(prefix) for name in one)]
    entries = [one for one in entries if step is None or one["step"] <= step]
    newest = [one for one in entries if one["step"] == entries[-1]["step"]]
    return {name: value for one in newest for name, value in one.items() if name not in _BOOKKEEPING}


def _known(facts: Facts) -> list[tuple[str, str]]:
    """Facts as text, without unknown ones."""
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in facts.items()}
    return [(name, text) for name, text in texts.items() if facts[name] is not None]


def _on_hub(name: str | None, folder: Path) -> str | None:
    """The name as a hub id, unless it is the name of a local file or folder, here or next to the run."""
    found, places = hub_id(name), (Path(), *folder.parents)
    is_file = found is None or found.endswith(_FILE_ENDINGS) or any((place / found).exists() for place in places)
    return None if is_file else found
