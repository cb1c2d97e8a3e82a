"""Export of a full model, from a checkpoint or any other folder, in another dtype and shard size, with a comparison.

As for adapters, nothing is partitioned, and there are never two models in memory. A model that is rounded is loaded
three times: unchanged, to be measured; rounded while it is read; and from the export.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from alignment.checkpoint.exporting.card import recorded_base, write_card
from alignment.checkpoint.exporting.check import OutputChange, Samples, compare, outputs
from alignment.checkpoint.exporting.folder import (
    DTYPES,
    REPORT,
    Tell,
    check_options,
    dtype_name,
    load_tokenizer,
    quiet,
    sample_rows,
    save,
    written,
)
from alignment.checkpoint.exporting.masters import put_masters
from alignment.checkpoint.exporting.report import ModelReport, advice
from alignment.checkpoint.exporting.source import WeightFiles, check_manifest, checked_masters, weight_files
from alignment.config.errors import ModelError, counted, first_line
from alignment.internals.transformers import loading
from alignment.models.adapters.folder import task_name
from alignment.models.adapters.survival import SurvivalMeter
from alignment.models.source import read_config
from alignment.models.tasks import CAUSAL_LM, CLASSIFIER, REWARD_MODEL, Task, is_classifier

Outputs = list[float] | None


def export_model(
    source: Path,
    out: Path,
    *,
    dtype: str = "auto",
    base: str | None = None,
    revision: str | None = None,
    samples: Samples | str | None = None,
    sample_count: int = 8,
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    tell: Tell = lambda line: None,
) -> ModelReport:
    """Write the model in ``source`` to ``out``. For a single process.

    Args:
        source: a checkpoint, or any other Hugging Face folder of a causal language model or reward model.
        out: a folder that does not exist or is empty.
        dtype: ``bfloat16``, ``float16`` or ``float32``; ``auto`` for the dtype of the source.
        base: folder or Hub name of the model before training, to measure the effect of training; None for the folder
            in the run's options, if it exists.
        revision: revision of the base.
        samples: rows to compare outputs on, or the name of a dataset; None for built-in texts.
        sample_count: number of rows if ``samples`` does not list them; 0 skips the comparison.
        max_shard_size: maximum size of a weight file, such as ``5GB``.
        trust_remote_code: run code that comes with the model or the tokenizer.
        tell: called with a message for every step.

    Raises:
        OptionError: ``dtype``, ``sample_count`` or ``max_shard_size`` is invalid.
        OutputError: ``out`` is not empty or cannot be written.
        ModelError: the source or the base cannot be used.
        CheckpointError: a file of a checkpoint has changed since it was written.
        DataError: the dataset of the samples cannot be used.
    """
    shard_bytes = check_options(dtype, sample_count, max_shard_size, out)
    manifest = check_manifest(source)
    files, task = weight_files(source), _task(source)
    target = files.dtype if dtype == "auto" else DTYPES[dtype]
    config = _config(source, task, trust_remote_code)
    tokenizer = load_tokenizer(str(source), None, trust_remote_code, needed=False)
    model = Source(source, task, files, target, trust_remote_code, tell)
    rows = sample_rows(samples, sample_count, tokenizer, config)
    wide = target == torch.float32 != files.dtype
    masters = checked_masters(source, manifest) if wide else iter(())
    tell(f"{source}: {task.noun} in {dtype_name(files.dtype)}; exporting in {dtype_name(target)}")
    with quiet():
        start = _start(model, base, revision, recorded_base(source, manifest), rows)
        meter = SurvivalMeter()
        loaded, exact, rounded = _loaded(model, rows, masters, start, meter)
        with written(out) as partial:
            tell(f"writing {out}")
            save(loaded.model, tokenizer, partial, shard_bytes)
            count = loaded.masters
            del loaded
            gc.collect()
            change = _change(model, rows, start.outputs, exact, model.exported(partial, rows))
            report = ModelReport(
                source.absolute().name, start.name, task_name(task), dtype_name(files.dtype), dtype_name(target),
                count, meter.total if meter.tensors else None, meter.worst, change,
                _change(model, rows, start.outputs, exact, rounded) if count else None,
                advice(change, dtype_name(target), "use the source as it is"),
            )  # fmt: skip
            (partial / REPORT).write_text(report.json(), encoding="utf-8")
            write_card(partial, source, manifest, report, start.name, out.absolute().name)
    return report


@dataclass(frozen=True)
class Source:
    """The model to export: how to load and measure it."""

    path: Path
    task: Task
    files: WeightFiles
    target: torch.dtype
    trust_remote_code: bool
    tell: Tell

    @property
    def is_rounded(self) -> bool:
        """Whether the weights are rounded to the dtype of the export."""
        return self.target not in (self.files.dtype, torch.float32)

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """Load the model on the host, in ``dtype`` except for modules that transformers keeps in fp32.

        Raises:
            ModelError: the model cannot be loaded, or a weight is not finite in this dtype.
        """
        model = load_whole(str(self.path), self.task, dtype, self.trust_remote_code, self.tell)
        for name, parameter in model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                too_large = dtype == torch.float16 != self.files.dtype
                raise ModelError(
                    f"{self.path}: {name} {'does not fit float16' if too_large else 'is not finite'}; "
                    + ("export in bfloat16" if too_large else "the model is broken, so export another checkpoint")
                )
        return model

    def outputs(self, model: PreTrainedModel, rows: Samples | None) -> Outputs:
        """The outputs of a model on the rows."""
        return None if rows is None else outputs(model, rows, self.task is CLASSIFIER)

    def exported(self, path: Path, rows: Samples | None) -> Outputs:
        """The outputs of the reloaded export on the rows."""
        if rows is None:
            return None
        return self.outputs(load_whole(str(path), self.task, "auto", self.trust_remote_code), rows)


@dataclass(frozen=True)
class Start:
    """The model before training, as far as it is available: its name, its outputs on the rows, and its files."""

    name: str | None
    outputs: Outputs = None
    files: WeightFiles | None = None


@dataclass
class Loaded:
    """The model in the dtype of the export, and the number of its tensors that are master weights."""

    model: PreTrainedModel
    masters: int


def _loaded(
    source: Source, rows: Samples | None, masters: Iterator[tuple[str, Tensor]], start: Start, meter: SurvivalMeter
) -> tuple[Loaded, Outputs, Outputs]:
    """The model to write; the exact outputs of the source on the rows, and those of its model files.

    ``meter`` measures how much of the update survives rounding, now or earlier.
    """

    def see(name: str, new: Tensor, dtype: torch.dtype) -> None:
        old = None if start.files is None else start.files.get(name, new.shape)
        if old is not None:
            meter.add(name, old, new.float(), dtype)

    if source.is_rounded:
        exact = _measured(source, rows, see)
        gc.collect()
        return Loaded(source.load(source.target), 0), exact, exact
    model, dtype = source.load(source.target), source.files.dtype
    stored = source.outputs(model, rows)
    count = put_masters(model, masters, dtype, source.path, lambda name, new: see(name, new, dtype))
    return Loaded(model, count), source.outputs(model, rows) if count else stored, stored


def _measured(source: Source, rows: Samples | None, see: Callable[[str, Tensor, torch.dtype], None]) -> Outputs:
    """The outputs of the source on the rows before rounding; its memory is free when this returns."""
    model = source.load(source.files.dtype)
    for name, parameter in model.named_parameters():
        see(name, parameter.data, source.target)
    return source.outputs(model, rows)


def _start(
    source: Source, given: str | None, revision: str | None, recorded: str | None, rows: Samples | None
) -> Start:
    """The model before training. If it was not passed but only recorded, it may be missing or broken."""
    name = given or recorded
    if name is None or (given is None and not Path(name).is_dir()):
        return Start(name)
    try:
        arguments: dict[str, Any] = {"revision": revision} if revision else {}
        task = REWARD_MODEL if source.task is CLASSIFIER else source.task  # its base may lack a head
        config = read_config(
            name, key="base", trust_remote_code=source.trust_remote_code, init_kwargs=arguments, task=task
        )
        outputs = None
        if rows is not None and _comparable(config, source.task, rows):
            model = load_whole(name, source.task, "auto", source.trust_remote_code, **arguments)
            outputs = source.outputs(model, rows)
            del model
            gc.collect()
        return Start(name, outputs, _files_of(name, revision))
    except ModelError as error:
        if given is not None:
            raise
        source.tell(f"the effect of training is not measured: {error}")
        return Start(name)


def _files_of(name: str, revision: str | None) -> WeightFiles | None:
    """The base's tensors on disk; None if it has no safetensors files, or they were not downloaded."""
    try:
        return weight_files(
            Path(name)
            if Path(name).is_dir()
            else Path(snapshot_download(name, revision=revision, local_files_only=True))
        )
    except (ModelError, OSError, ValueError):
        return None


def _comparable(config: PretrainedConfig, task: Task, rows: Samples) -> bool:
    """Whether the base can process the rows: it has the head of a classifier, and all tokens."""
    known = config.get_text_config().vocab_size > max(max(row) for row in rows.rows)
    return known and (task is not CLASSIFIER or is_classifier(config))


def _change(
    source: Source, rows: Samples | None, base: Outputs, exact: Outputs, other: Outputs
) -> OutputChange | None:
    if rows is None or exact is None or other is None:
        return None
    return compare(rows, "score" if source.task is CLASSIFIER else "log-prob per token", base, exact, other)


def _task(source: Path) -> Task:
    """The task, from the class that the model was saved as."""
    try:
        content = json.loads((source / "config.json").read_text(encoding="utf-8"))
        names = content.get("architectures") or []
        return CLASSIFIER if any("SequenceClassification" in name for name in names) else CAUSAL_LM
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{source / 'config.json'} cannot be read ({first_line(error)}); copy it again") from error


def _config(source: Path, task: Task, trust_remote_code: bool) -> PretrainedConfig:
    config = read_config(str(source.absolute()), key="source", trust_remote_code=trust_remote_code, task=task)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{source}: the weights are quantized; export the model before quantization")
    return config


def load_whole(
    path: str, task: Task, dtype: torch.dtype | str, trust_remote_code: bool, tell: Tell | None = None, **more: Any
) -> PreTrainedModel:
    """Load a model on the host, in evaluation mode. ``tell`` is called about tensors that the model does not have.

    Raises:
        ModelError: the model cannot be loaded, or weights are missing.
    """
    arguments = {"trust_remote_code": trust_remote_code, **task.arguments, **more}
    try:
        with loading(None):
            model, report = task.auto.from_pretrained(path, dtype=dtype, output_loading_info=True, **arguments)
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"{path} could not be loaded: {first_line(error)}") from error
    if report["missing_keys"]:
        raise ModelError(
            f"{path}: the weights do not contain {min(report['missing_keys'])}; copy or download the folder again"
        )
    if report["unexpected_keys"] and tell is not None:
        names = sorted(report["unexpected_keys"])
        tell(f"{path}: skipping {counted(len(names), 'tensor')} that a {task.noun} does not have, such as {names[0]}")
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded
